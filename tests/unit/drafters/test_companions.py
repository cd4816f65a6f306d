"""`--draft auto`: which companion of a target is taken, from a cache of the hub's that the tests
fill, and what is said of those that are not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants

from outrider import LLM, SamplingParams
from outrider.build import Options, choose
from outrider.drafters import DRAFTERS, companions
from outrider.drafters.companions import (
    KINDS,
    TABLE,
    Companion,
    Target,
    candidates,
    choose_companion,
    offer,
    published,
)
from outrider.errors import ConfigError
from outrider.models.heads.eagle_files import save_eagle
from outrider.models.heads.shipped import shipped_head
from outrider.models.loading import hub
from tests.heads import medusa_heads, random_eagle
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama, word_tokenizer
from tests.hub_cache import put
from tests.mtp_heads import save_with_mtp

REPOSITORY = Path(__file__).resolve().parents[3]
TARGET = "someone/Tiny-1B-Instruct"
PAGE = "https://example.org/drafters"
Put = Callable[..., Path]


def target_model(**changes: Any) -> Any:
    return tiny_llama(257, num_hidden_layers=3, **changes)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a table of drafters, each with its kind, all for one target."""

    def table(**kinds: str) -> None:
        entries = [
            Companion(TARGET, f"x/{name}", kind, "mit", PAGE) for name, kind in kinds.items()
        ]
        monkeypatch.setattr(companions, "published", lambda: tuple(entries))

    return table


@pytest.fixture
def target(cache: Path) -> Path:
    """The target in the cache."""
    return put(cache, TARGET, lambda f: save_checkpoint(f, target_model(), byte_tokenizer()))


def put_eagle3(cache: Path, name: str, **changes: Any) -> Path:
    head = random_eagle("eagle3", target_model(**changes).config, draft_vocab=40)
    return put(cache, f"x/{name}", lambda folder: save_eagle(head, folder))


def put_model(cache: Path, name: str, tokenizer: Any = None, vocab: int = 257) -> Path:
    model = tiny_llama(vocab, seed=2, num_hidden_layers=1)
    return put(
        cache,
        f"x/{name}",
        lambda folder: save_checkpoint(folder, model, tokenizer or byte_tokenizer()),
    )


# ---------------------------------------------------------------- the table


def test_the_table_is_well_formed() -> None:
    """Every entry can be drafted with, says where it was seen, and is there once."""
    entries = json.loads(TABLE.read_text(encoding="utf-8"))
    page = (REPOSITORY / "docs" / "support.md").read_text(encoding="utf-8")
    fields = list(Companion.__dataclass_fields__)
    assert 25 <= len(entries) <= 61
    for entry in entries:
        assert list(entry) == fields
        assert all(isinstance(value, str) and value for value in entry.values()), entry
        assert hub.REPOSITORY.fullmatch(entry["target"]), entry
        comes_along = shipped_head(entry["drafter"]) is not None
        assert comes_along or hub.REPOSITORY.fullmatch(entry["drafter"]), entry
        assert entry["kind"] in KINDS, entry
        assert f"`{entry['kind']}`" in page, entry
        assert re.fullmatch(r"https://\S+", entry["source"]), entry
    pairs = [(entry["target"], entry["drafter"]) for entry in entries]
    assert len(set(pairs)) == len(pairs)
    targets = {entry["target"] for entry in entries}
    bare = {companions._bare(name) for name in targets}
    assert len(bare) == len(targets), "two targets would be taken for one"
    assert [companion.drafter for companion in published()] == [drafter for _, drafter in pairs]


def test_every_kind_is_a_drafter() -> None:
    for kind in KINDS:
        required = DRAFTERS.load(kind).requires
        assert required.head or required.draft, kind


@pytest.mark.parametrize(
    ("name", "listed_as"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "Qwen/Qwen3-8B"),
        ("x/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M", "meta-llama/Llama-3.1-8B-Instruct"),
        ("x/Qwen3-8B-GPTQ-Int4", "Qwen/Qwen3-8B"),
        ("x/Qwen3-8B-quantized.w8a8", None),
        ("Qwen/Qwen3-8B-Base", None),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B-Thinking-2507"),
    ],
)
def test_names_by_which_the_table_knows_a_target(
    name: str, listed_as: str | None, cache: Path
) -> None:
    names = Target(name, fetches=False).names
    found = {entry.target for entry in published() if companions._bare(entry.target) in names}
    assert found == ({listed_as} if listed_as else set())


def test_a_folder_is_known_by_its_name(tmp_path: Path, target: Path) -> None:
    folder = save_checkpoint(tmp_path / "Qwen3-8B", target_model(), byte_tokenizer())
    assert "qwen3-8b" in Target(str(folder)).names
    assert Target(str(target)).ids == [TARGET]


# ---------------------------------------------------------------- the choice


def test_a_head_that_is_here_and_fits_is_taken(
    cache: Path, target: Path, listed: Callable[..., None]
) -> None:
    """The first in the table that is here; nothing else is read of the others."""
    listed(absent="block", head="eagle3", later="eagle3")
    folder = put_eagle3(cache, "head")
    choice = choose_companion(Target(TARGET))
    assert (choice.draft, choice.kind) == (str(folder), "eagle3")
    (note,) = choice.notes
    assert note == (
        f"--draft auto: x/head drafts (eagle3, licence mit; {PAGE}): it is on this machine, and "
        "the shapes of its weights fit"
    )


def test_a_draft_model_is_taken_by_its_tokenizer(
    cache: Path, target: Path, listed: Callable[..., None]
) -> None:
    listed(small="draft-model")
    folder = put_model(cache, "small")
    choice = choose_companion(Target(TARGET))
    assert (choice.draft, choice.kind) == (str(folder), "draft-model")
    assert choice.notes[0].endswith("and its tokenizer is the target's")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    assert choose_companion(Target(TARGET)).notes[0].endswith("and its tokens are the target's")


def test_what_does_not_fit_is_left_aside_by_name(
    cache: Path, target: Path, listed: Callable[..., None]
) -> None:
    """With the values of both, before any weight is read; the next one is taken."""
    listed(wide="eagle3", other="draft-model", narrow="medusa", fits="eagle3")
    put_eagle3(cache, "wide", hidden_size=128)
    put_model(cache, "other", word_tokenizer(50), vocab=50)
    put(cache, "x/narrow", lambda folder: medusa_heads(target_model(hidden_size=32), folder))
    folder = put_eagle3(cache, "fits")
    choice = choose_companion(Target(TARGET))
    assert choice.draft == str(folder)
    wide, other, narrow, _ = choice.notes
    assert wide.startswith("--draft auto left x/wide aside: ")
    assert "128" in wide
    assert "64" in wide
    assert "50 against 257 tokens" in other
    assert "32" in narrow
    assert "64" in narrow


@pytest.mark.parametrize("damage", ["cut", "config", "values", "other kind", "no weights"])
def test_damaged_files_are_named(
    damage: str, cache: Path, target: Path, listed: Callable[..., None]
) -> None:
    """A stranger's files end no search with a traceback."""
    listed(head="eagle3")
    folder = put_eagle3(cache, "head")
    weights = folder / "model.safetensors"
    expected = "left x/head aside: "
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "config":
        (folder / "config.json").write_text("[]")
    elif damage == "values":
        odd = {"model_type": "gemma4_assistant", "text_config": "x"}
        (folder / "config.json").write_text(json.dumps(odd))
        expected += "its files cannot be read (AttributeError: "
    elif damage == "other kind":
        put_model(cache, "head")
        expected += "it was published as eagle3, and its files are draft-model"
    else:
        weights.unlink()
        expected = "--draft x/head fetches a drafter"
    choice = choose_companion(Target(TARGET))
    assert choice.kind is None
    assert any(expected in note for note in choice.notes), choice.notes


def test_nothing_is_downloaded(cache: Path, target: Path, listed: Callable[..., None]) -> None:
    """What would be is named, with the option that takes it; earlier text drafts meanwhile."""
    listed(head="eagle3", small="draft-model")
    options, parts = choose(Options(TARGET, draft="auto"))
    assert (options.drafter, options.draft) == ("suffix", None)
    offline, named = parts.notes
    assert offline == "the hub is out of reach, so it was not asked for more drafters"
    assert named == (
        "--draft auto downloads nothing: --draft x/head fetches a drafter of this target (eagle3, "
        f"licence mit); 1 more: outrider ls drafters-for {TARGET}"
    )
    listed()
    assert choose(Options(TARGET, draft="auto"))[1].notes[-1] == (
        f"--draft auto: no drafter is known for '{TARGET}'"
    )


def test_the_head_in_the_checkpoint_comes_first(
    cache: Path, target: Path, listed: Callable[..., None]
) -> None:
    listed(head="eagle3")
    put_eagle3(cache, "head")
    put(cache, TARGET, lambda f: save_with_mtp(f, lambda seed: tiny_llama(257, seed), "qwen"))
    choice = choose_companion(Target(TARGET))
    assert (choice.draft, choice.kind) == (None, "mtp")
    assert choice.notes == ("--draft auto: the MTP head in the target's checkpoint drafts",)
    assert choose(Options(TARGET, draft="auto"))[0].drafter == "mtp"


def test_a_drafter_that_was_named_limits_the_choice(
    cache: Path, target: Path, listed: Callable[..., None]
) -> None:
    listed(head="eagle3", small="draft-model")
    put_eagle3(cache, "head")
    folder = put_model(cache, "small")
    options, parts = choose(Options(TARGET, drafter="draft-model", draft="auto"))
    assert (parts.drafter_name, options.draft) == ("draft-model", str(folder))
    options, parts = choose(Options(TARGET, drafter="eagle3 tree=best-first", draft="auto"))
    assert parts.requirements.head_folder is not None
    with pytest.raises(ConfigError, match=r"'medusa' has nothing to draft with: .* of kind medusa"):
        choose(Options(TARGET, drafter="medusa", draft="auto"))
    with pytest.raises(ConfigError, match="drafter 'suffix' uses no draft model, but draft='auto'"):
        choose(Options(TARGET, drafter="suffix", draft="auto"))


def test_the_demo_drafts_with_what_comes_with_it() -> None:
    options, parts = choose(Options("demo", draft="auto"))
    assert (parts.drafter_name, options.draft) == ("draft-model", None)
    assert parts.notes == ("--draft auto: what comes with the demo drafts",)


def test_the_text_is_the_targets(cache: Path, target: Path, listed: Callable[..., None]) -> None:
    listed(head="eagle3")
    put_eagle3(cache, "head")
    params = SamplingParams(max_tokens=20, temperature=0)
    texts = []
    for options in ({"drafter": "none"}, {"draft": "auto"}):
        with LLM(TARGET, threads=1, runtime="eager", **options) as llm:
            texts.append(llm.generate(["Once upon"], params)[0].token_ids)
    assert texts[0] == texts[1]
    assert llm.config["drafter"] == "eagle3"
    assert any(note.startswith("--draft auto: x/head drafts") for note in llm.notes)


def test_one_line_offers_what_nobody_asked_for(
    cache: Path, target: Path, listed: Callable[..., None]
) -> None:
    listed(absent="block", head="eagle3")
    assert offer(TARGET) == "x/absent drafts for this model: --draft x/absent (a download)"
    put_eagle3(cache, "head")
    assert offer(TARGET) == "x/head is here and drafts for this model: --draft auto"
    put_eagle3(cache, "head", hidden_size=128)
    put_eagle3(cache, "absent", hidden_size=128)
    assert offer(TARGET) is None, "none that is here fits"
    assert offer("someone/else") is None
    assert offer("x/broken.gguf") is None


# ---------------------------------------------------------------- the hub


class Api:
    """Answers of the hub about models."""

    listing: tuple[Any, ...] = ()
    base: Any = None
    asked: ClassVar[list[Any]] = []

    def list_models(self, *, filter: list[str], limit: int) -> Any:
        self.asked.append(filter)
        return self.listing

    def model_info(self, name: str, timeout: float) -> Any:
        return SimpleNamespace(card_data=SimpleNamespace(base_model=self.base))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> type[Api]:
    """A hub that is in reach and knows nothing yet."""
    monkeypatch.setattr(companions.hub, "only_cached", lambda name: False)
    monkeypatch.setattr(companions.huggingface_hub, "HfApi", Api, raising=False)
    monkeypatch.setattr(Api, "listing", ())
    monkeypatch.setattr(Api, "asked", [])
    return Api


def found(name: str, *tags: str | None) -> Any:
    return SimpleNamespace(id=name, tags=list(tags))


def test_the_hub_is_asked_by_base_model(
    cache: Path, api: type[Api], listed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the target and for what it was made of. What is no drafter is left out."""
    listed(head="eagle3")
    monkeypatch.setattr(api, "base", ["someone/Base", 7, "a/b/c"])
    monkeypatch.setattr(
        api,
        "listing",
        (
            found("x/head", "eagle3"),
            found("y/Tiny-EAGLE3", "license:apache-2.0", None),
            found("y/some-DFlash", "speculative-decoding"),
            found("y/chat-model", "speculative-decoding"),
            found("y/odd/name-eagle3"),
        ),
    )
    notes: list[str] = []
    every = [one.companion for one in candidates(Target(TARGET, fetches=False), notes)]
    named = [(one.drafter, one.kind, one.licence) for one in every]
    assert named == [
        ("x/head", "eagle3", "mit"),
        ("y/Tiny-EAGLE3", "eagle3", "apache-2.0"),
        ("y/some-DFlash", "block", "unknown"),
    ]
    assert every[1].source.endswith("/y/Tiny-EAGLE3")
    assert api.asked == [
        [f"base_model:{TARGET}", "speculative-decoding"],
        ["base_model:someone/Base", "speculative-decoding"],
    ]
    assert notes == []


def test_the_hub_is_not_asked_where_the_table_suffices(
    cache: Path, target: Path, api: type[Api], listed: Callable[..., None]
) -> None:
    listed(head="eagle3")
    put_eagle3(cache, "head")
    known = Target(TARGET, fetches=False)
    assert next(candidates(known, [])).fits
    assert api.asked == []


def test_a_hub_that_answers_nonsense_is_left(
    cache: Path, api: type[Api], listed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed()
    monkeypatch.setattr(api, "model_info", lambda *_, **__: 1 / 0)
    notes: list[str] = []
    assert list(candidates(Target(TARGET, fetches=False), notes)) == []
    assert notes == ["the hub did not say which drafters it has (ZeroDivisionError)"]
