"""MTP heads at work: their drafts are those of the head applied to the whole text, whatever the
layout, cache and runtime."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation import candidate_generator
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from outrider.build import Built, Options, build
from outrider.draft_length import FixedLength
from outrider.errors import CapabilityError, ConfigError
from outrider.models.heads.mtp_files import ships_mtp
from outrider.models.loading.load import load_config, load_module
from outrider.models.source import resolve
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from tests.contract.multimodal_families import make_whole
from tests.contract.own_cache_families import FAMILIES as ON_THEIR_OWN
from tests.contract.own_cache_families import NATIVE
from tests.contract.test_multimodal import saved as saved_whole
from tests.helpers import make_row, run_to_end, tiny_llama, word_tokenizer
from tests.mtp_heads import SHIPPED, WEIGHTS, MtpReference, save_with_mtp
from tests.older_transformers import IS_OLDER, skip_older
from tests.unit.runtime.families import FAMILIES, HALF_WINDOWED, SIZES

VOCAB = SIZES["vocab_size"]
PROMPTS = ([5, 6, 7, 8, 9], [3, 4, 5, 3, 4, 5, 3], [11, 12])
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
STAND_INS = [("qwen2", "mimo"), ("qwen3", "qwen")]  # MiMo's code is its own; dense
ON_OUR_CACHE = [
    *STAND_INS,
    ("glm_ocr", "deepseek"),
    *(each for each in SHIPPED.items() if each[0] in FAMILIES),
]
BESIDE_STATES = [(family, layout) for family, layout in SHIPPED.items() if family in NATIVE]
SEVERAL = [
    ("glm4_moe", "deepseek", 3),
    ("qwen3_5_text", "qwen", 2),
    ("deepseek_v32", "deepseek", 3),
]
CHANGED: dict[str, dict[str, Any]] = {
    "mellum": {**HALF_WINDOWED, "num_mtp_layers": 1, "layer_types": ["full_attention", "sliding_attention"]},
}  # fmt: skip
# with transformers 5.17
OLDER = {"mellum": "its config does not say that the head's attention is windowed"}
# the last two make a layer of the head
STACKED = {"layers_block_type": ["mamba", "attention", "moe"]}


def random_model(family: str, seed: int) -> Any:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    if family == "glm_ocr":
        return make_random_whole(family, seed)
    own = {**(FAMILIES.get(family) or ON_THEIR_OWN.get(family) or {}), **CHANGED.get(family, {})}
    named = {**SIZES, **own, "eos_token_id": 0}
    if family == "nemotron_h":
        named = {
            **{key: value for key, value in named.items() if key != "num_hidden_layers"},
            **STACKED,
        }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **copy.deepcopy(named))
        return (
            AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            .eval()
            .requires_grad_(False)
        )


def make_random_whole(family: str, seed: int) -> Any:
    """A random checkpoint that takes pictures, as it is published."""
    whole = make_whole(family)
    generator = torch.Generator().manual_seed(seed)
    for weight in whole.parameters():
        weight += (
            0.5 * weight.std() * torch.randn(weight.shape, generator=generator)
            if weight.numel() > 1
            else 0
        )
    return whole


def random_text(config: Any, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return (
            AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
            .eval()
            .requires_grad_(False)
        )


def echoing_llama(seed: int, *, noise: float = 0.0) -> Any:
    """A target of one layer over embeddings of length 1, which a head with the same layer follows
    nearly always."""
    model = tiny_llama(VOCAB, sharpness=1.5, num_hidden_layers=1).requires_grad_(False)
    table = model.get_input_embeddings().weight
    table.copy_(table / table.pow(2).mean(-1, keepdim=True).sqrt())
    if seed and noise:
        generator = torch.Generator().manual_seed(seed)
        for weight in model.model.layers.parameters():
            weight += (
                noise * weight.std() * torch.randn(weight.shape, generator=generator)
                if weight.dim() > 1
                else 0
            )
    return model


class Ragged(FixedLength):
    """Another length for every row and step, 0 among them."""

    def choose(self, rows: Rows) -> list[int]:
        return [
            row.clamp_draft((len(row.tokens) + index) % (self.gamma + 1))
            for index, row in enumerate(rows)
        ]


def built(folder: Path, runtime: str = "eager", **options: Any) -> Built:
    return build(
        Options(
            target=str(folder),
            dtype="float32",
            threads=1,
            num_draft_tokens=3,
            runtime=runtime,
            **options,
        )
    )


def saved(folder: Path, make: Callable[[int], Any], layout: str, **options: Any) -> MtpReference:
    reference = save_with_mtp(folder, make, layout, **options)
    word_tokenizer(VOCAB).save_pretrained(folder)
    return reference


def watched(made: Built) -> list[tuple[list[int], list[int]]]:
    """(text, draft) of every chain that is proposed from now on."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = made.decoder.drafter.propose

    def watching(rows: Rows, gamma: list[int]) -> Draft:
        draft = propose(rows, gamma)
        for row, tokens, length in zip(rows, *draft.lists[:2], strict=True):
            seen.append((list(row.tokens), tokens[:length]))
        return draft

    made.decoder.drafter.propose = watching  # type: ignore[method-assign]
    return seen


def write(made: Built, params: SamplingParams = PARAMS) -> list[Any]:
    """All prompts in one batch, which they join one by one."""
    for number, prompt in enumerate(PROMPTS):
        made.decoder.add(make_row(prompt, params, number=number, seed=number))
        made.decoder.step()
    return run_to_end(made.decoder)


def check(folder: Path, reference: MtpReference, runtime: str) -> None:
    """Every draft of a batch is the reference's; the texts are plain decoding's."""
    made = built(folder, runtime, drafter="mtp")
    seen = watched(made)
    rows = write(made)
    assert sum(len(draft) for _, draft in seen) > 60
    for text, draft in seen:
        assert not draft or draft == reference.draft(text, len(draft))[0], text
    assert [row.output for row in rows] == [
        row.output for row in write(built(folder, runtime, drafter="none"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), ON_OUR_CACHE)
def test_drafts_of_every_layout(tmp_path: Path, family: str, layout: str) -> None:
    """Catches norms mixed up, the projection's halves in the wrong order, a state before the norm
    where it is read behind it, a rejected draft that stays in the cache, a row fed another row's
    states. On the native runtime, where every pass is lowered."""
    if IS_OLDER and family in OLDER:
        pytest.skip(OLDER[family])
    check(tmp_path, saved(tmp_path, partial(random_model, family), layout), "native")
    assert ships_mtp(str(tmp_path))


@pytest.mark.slow
def test_a_head_of_another_folder_says_how_far_it_knows(tmp_path: Path) -> None:
    """Catches drafts beyond the context of a head whose target can hold more; several layers drop
    what they put aside, too."""
    for layers in (1, 2):
        folder = tmp_path / str(layers)
        saved(folder, partial(random_model, "deepseek_v3"), "deepseek")
        save_with_mtp(
            folder / "head",
            partial(random_model, "deepseek_v3"),
            "deepseek",
            num_layers=layers,
            alone=True,
        )
        config = json.loads((folder / "head" / "config.json").read_text())
        (folder / "head" / "config.json").write_text(
            json.dumps({**config, "max_position_embeddings": 16})
        )
        made = built(
            folder, "native", drafter="mtp", drafter_options={"head": str(folder / "head")}
        )
        assert any(
            "knows 16 positions" in note and "beyond 16 nothing is drafted" in note
            for note in made.notes
        )
        seen = watched(made)
        rows = write(made)
        assert all(len(text) + len(draft) <= 16 for text, draft in seen if draft)
        assert {len(text) for text, draft in seen if draft} >= {13, 14, 15}
        assert [row.output for row in rows] == [
            row.output for row in write(built(folder, "native", drafter="none"))
        ]


WINDOW = 5


@pytest.mark.parametrize("runtime", ["eager", "native"])
@pytest.mark.parametrize(
    ("family", "layout", "num_layers"),
    [("qwen3", "qwen", 1), ("deepseek_v3", "deepseek", 1), ("deepseek_v3", "deepseek", 3)],
)
def test_a_window(tmp_path: Path, runtime: str, family: str, layout: str, num_layers: int) -> None:
    """Catches a window that is off by one, or that one of the passes lacks. A head that knows short
    texts drafts in long ones, its cache keeps the window alone; `auto` is what the head knows."""
    make = partial(random_model, family)
    reference = saved(tmp_path, make, layout, num_layers=num_layers)
    for layer in reference.layers:
        for block in layer["blocks"]:
            block.self_attn.sliding_window = WINDOW
    made = built(tmp_path, runtime, drafter="mtp", drafter_options={"window": WINDOW})
    seen = watched(made)
    write(made)
    assert sum(len(draft) for _, draft in seen) > 60
    for text, draft in seen:
        assert not draft or draft == reference.draft(text, len(draft))[0], text
    assert made.decoder.drafter.caches[0].window == WINDOW
    config = json.loads((tmp_path / "config.json").read_text())
    head = {"max_position_embeddings": 16}
    save_with_mtp(tmp_path / "head", make, layout, num_layers=num_layers, alone=True)
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **head}))
    for window, expected in (("auto", 16), (100000, config["max_position_embeddings"])):
        options = {"head": str(tmp_path / "head"), "window": window}
        made = built(tmp_path, runtime, drafter="mtp", drafter_options=options)
        assert made.decoder.drafter.caches[0].window == expected
        assert not any("nothing is drafted" in note for note in made.notes)
        seen = watched(made)
        write(made)
        assert any(draft for text, draft in seen if len(text) > 16)
    with pytest.raises(ConfigError, match="drafter 'mtp': window=3 is smaller than a draft of 3"):
        built(tmp_path, runtime, drafter="mtp", drafter_options={"window": 3})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), BESIDE_STATES)
def test_targets_with_states(tmp_path: Path, family: str, layout: str) -> None:
    """Next to a hybrid the head keeps keys and values of its own."""
    check(tmp_path, saved(tmp_path, partial(random_model, family), layout), "native")
    assert ships_mtp(str(tmp_path))
    with pytest.raises(
        CapabilityError, match=r"states cannot branch|needs transformers' own cache"
    ):
        built(tmp_path, drafter="mtp", drafter_options={"tree": "2x2x1"})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), BESIDE_STATES)
def test_trees_beside_a_hybrid(tmp_path: Path, family: str, layout: str) -> None:
    """On the native runtime states branch: the texts are plain decoding's to the bit, with T = 1 as
    with T = 0."""
    saved(tmp_path, partial(random_model, family), layout)
    made = built(tmp_path, "native", drafter="mtp", drafter_options={"tree": "2x2x1"})
    plain = built(tmp_path, "native", drafter="none")
    assert made.config()["exact"]
    assert made.draws_trees
    assert [row.output for row in write(made)] == [row.output for row in write(plain)]
    assert sum(row.stats.accepted for row in write(made, replace(PARAMS, temperature=1.0))) > 0


@pytest.mark.slow
def test_a_head_and_a_look_up_take_turns_beside_a_hybrid(tmp_path: Path) -> None:
    """`mode=best` drafts chains; the text is plain decoding's to the bit."""
    saved(tmp_path, partial(random_model, "qwen3_5_text"), "qwen")
    parts = {"parts": "mtp,ngram"}
    made = built(tmp_path, "native", drafter="composite", drafter_options={**parts, "mode": "best"})
    assert made.config()["exact"]
    assert not made.draws_trees
    asked = {part.name: 0 for part in made.decoder.drafter.parts}  # type: ignore[attr-defined]
    propose = made.decoder.drafter.propose

    def watching(rows: Rows, gamma: list[int]) -> Draft:
        draft = propose(rows, gamma)
        assert draft.parents is None
        for part in made.decoder.drafter.parts:  # type: ignore[attr-defined]
            asked[part.name] += sum(part.draft.lists[1])
        return draft

    made.decoder.drafter.propose = watching  # type: ignore[method-assign]
    assert [row.output for row in write(made)] == [
        row.output for row in write(built(tmp_path, "native", drafter="none"))
    ]
    assert all(asked.values()), asked


@pytest.mark.slow
def test_a_head_and_a_look_up_draft_one_tree_beside_a_hybrid(tmp_path: Path) -> None:
    """Parts merged into a tree branch the states at every kind of node; the text is plain
    decoding's to the bit."""
    saved(tmp_path, partial(random_model, "qwen3_5_text"), "qwen")
    made = built(tmp_path, "native", drafter="composite", drafter_options={"parts": "mtp,ngram"})
    assert made.draws_trees
    assert [row.output for row in write(made)] == [
        row.output for row in write(built(tmp_path, "native", drafter="none"))
    ]


@pytest.mark.slow
def test_a_checkpoint_that_takes_pictures(tmp_path: Path) -> None:
    """Qwen3.5's are published so: the text's sizes are a part of the config, its layers have other
    names than the head's."""
    saved_whole("qwen3_5", tmp_path / "model")
    source = resolve(str(tmp_path / "model"))
    text: Any = load_module(source, load_config(source), torch.float32, torch.device("cpu"))
    reference = save_with_mtp(
        tmp_path / "head",
        lambda seed: random_text(text.config, seed) if seed else text,
        "qwen",
        alone=True,
    )
    head, whole = (load_file(tmp_path / name / WEIGHTS) for name in ("head", "model"))
    save_file({**whole, **head}, tmp_path / "model" / WEIGHTS, metadata={"format": "pt"})
    made = built(tmp_path / "model")
    assert made.options.drafter == "mtp"
    seen = watched(made)
    write(made)
    assert sum(len(draft) for _, draft in seen) > 60
    assert all(
        not draft or draft == reference.draft(tokens, len(draft))[0] for tokens, draft in seen
    )


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "num_layers"), SEVERAL)
def test_several_layers_take_turns(
    tmp_path: Path, family: str, layout: str, num_layers: int
) -> None:
    """Catches a layer at the wrong position, one not run before a commit, guesses kept in a deeper
    layer's cache."""
    reference = saved(tmp_path, partial(random_model, family), layout, num_layers=num_layers)
    check(tmp_path, reference, "auto")
    made = built(tmp_path, drafter="mtp")
    made.decoder.control = Ragged(num_layers)
    seen = watched(made)
    write(made)
    assert {len(draft) for _, draft in seen} == set(range(num_layers + 1))
    assert all(not draft or draft == reference.draft(text, len(draft))[0] for text, draft in seen)


OF_LATE = skip_older("`use_mtp` fails for layers of two kinds")
BY_TRANSFORMERS = [
    ("deepseek_v3", "deepseek", 1), ("glm4_moe", "deepseek", 1), ("glm4_moe", "deepseek", 2),
    pytest.param("mellum", "qwen", 1, marks=OF_LATE),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(candidate_generator, "MTPCandidateGenerator"), reason="transformers 5.23 has it"
)
@pytest.mark.parametrize(("family", "layout", "num_layers"), BY_TRANSFORMERS)
def test_drafts_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, layout: str, num_layers: int
) -> None:
    """Against `generate(use_mtp=True)`, which drafts one token with each layer, from the first pass
    behind the prompt on."""
    saved(tmp_path, partial(random_model, family), layout, num_layers=num_layers)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    # by which it finds the head
    model._keys_to_ignore_on_load_unexpected = [r"\blayers\.[23]\.", r"^mtp\."]
    theirs: dict[tuple[int, ...], list[int]] = {}
    generator: Any = candidate_generator.MTPCandidateGenerator
    propose = generator.get_candidates

    def recording(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        found, logits = propose(self, input_ids, *args, **kwargs)
        theirs[tuple(input_ids[0].tolist())] = found[0, input_ids.shape[1] :].tolist()
        return found, logits

    monkeypatch.setattr(generator, "get_candidates", recording)
    prompt = torch.tensor([PROMPTS[1]])
    text = model.generate(
        prompt, max_new_tokens=14, do_sample=False, use_mtp=True, eos_token_id=None
    )[0].tolist()
    made = built(tmp_path, drafter="mtp")
    made.decoder.control = FixedLength(num_layers)
    seen = watched(made)
    made.decoder.add(make_row(PROMPTS[1], SamplingParams(max_tokens=14, ignore_eos=True)))
    assert run_to_end(made.decoder)[0].tokens == text
    whole = [(tuple(tokens), draft) for tokens, draft in seen if len(draft) == num_layers]
    compared = [(theirs[tokens], draft) for tokens, draft in whole if theirs.get(tokens)]
    assert len(compared) >= 5
    assert all(one == other for one, other in compared)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["eager", "native"])
def test_a_good_head_is_followed(tmp_path: Path, runtime: str) -> None:
    """Catches a head that is fed one token too late: most drafts are kept, and some are rejected at
    every depth."""
    reference = saved(tmp_path, partial(echoing_llama, noise=0.05), "qwen", echoes=True)
    check(tmp_path, reference, runtime)
    stats = [row.stats for row in write(built(tmp_path, runtime))]  # auto
    accepted = sum(one.accepted for one in stats)
    tested = sum(one.tested for one in stats)
    assert 0.5 * tested < accepted < tested
