"""OUTRIDER in SGLang: the algorithm is registered, the worker drafts from texts, whatever becomes
of its requests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from itertools import pairwise
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outrider.drafters.base import Drafter
from outrider.errors import CapabilityError, ConfigError
from outrider.integrations.sglang import plugin, worker
from outrider.integrations.sglang.tested import TESTED
from tests.unit.integrations.sglang import stand_in
from tests.unit.integrations.sglang.stand_in import (
    CONTEXT,
    Request,
    rule,
    server_args,
    step,
    target_worker,
)

DRAFTERS = {
    "suffix": "", "ngram": "min_ngram=1", "ngram-cache": "", "composite": "parts=suffix,ngram",
}  # fmt: skip


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A worker on the stand-in for SGLang's."""
    monkeypatch.setattr(worker, "import_module", lambda name: stand_in.stand_in)

    def build(drafter: str = "suffix", options: str = "", ps: Any = None, **arguments: Any) -> Any:
        monkeypatch.setenv("OUTRIDER_DRAFTER", drafter)
        monkeypatch.setenv("OUTRIDER_DRAFTER_OPTIONS", options)
        return worker.worker_class()(
            server_args(**arguments), 0, ps or SimpleNamespace(tp_size=1), 0, target_worker()
        )

    return build


def request(name: str, seed: int, length: int = 20) -> Request:
    """A prompt and the token that its pass emitted."""
    random = Random(seed)
    prompt = [random.randrange(stand_in.VOCABULARY) for _ in range(length)]
    return Request(name, prompt, accepted=[rule(prompt)])


def plain(one: Request, length: int) -> list[int]:
    """The same text without drafts."""
    tokens = list(one.origin_input_ids)
    while len(tokens) < length:
        tokens.append(rule(tokens))
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_are_the_target_s_and_drafts_are_kept(make: Any, drafter: str, overlap: bool) -> None:
    """Requests join, leave, change slots, and come back; two ranks draft alike throughout."""
    ranks = [make(drafter, DRAFTERS[drafter], overlap=overlap) for _ in range(2)]
    batches = [[request(f"r{i}", i) for i in range(6)] for _ in ranks]
    random = Random(7)
    for number in range(40):
        order = random.sample(range(6), random.randint(1, 6)) if number % 3 == 0 else list(range(6))
        for rank, batch in zip(ranks, batches, strict=True):
            step(rank, [batch[i] for i in order if len(batch[i].tokens) < CONTEXT])
        assert [one.tokens for one in batches[0]] == [one.tokens for one in batches[1]]
    for one in batches[0]:
        assert one.tokens == plain(one, len(one.tokens))
    kept, asked = (sum(getattr(one, name) for one in batches[0]) for name in ("kept", "asked"))
    assert kept > asked / 4, f"{drafter} drafts nothing: {kept} tokens kept in {asked} steps"


def test_a_step_may_add_more_than_the_worker_looks_back(make: Any) -> None:
    """With a short table depth the ends of texts would not hold what a step added, and every step
    would read texts anew."""
    one = make(num_tokens=12, depth=4)
    assert one.max_trie_depth == 12
    assert make(num_tokens=4, depth=18).max_trie_depth == 18


def test_texts_are_read_once(make: Any) -> None:
    """Guards against a worker that reads the whole text in every step."""
    one = make("ngram", num_tokens=4)
    batch = [request("a", 1)]
    reads = []
    drafting = one.ngram_corpus._drafting
    start = drafting._start
    drafting._start = lambda ask: (reads.append(ask.length), start(ask))
    for _ in range(20):
        step(one, batch)
    # a repeated last token may be accepted by luck, and then the text is read again
    filler = batch[0].tokens
    assert len(reads) <= 1 + sum(a == b for a, b in pairwise(filler))


def test_drafts_end_where_the_context_does(make: Any) -> None:
    one = make("ngram", num_tokens=8)
    batch = [request("a", 3, CONTEXT - 4)]
    step(one, batch)
    draft = one.ngram_corpus._drafting._sent[0].tokens
    assert len(draft) <= 2


def test_reset_forgets_texts_and_goes_on(make: Any) -> None:
    one = make()
    batch = [request("a", 5)]
    step(one, batch)
    one.ngram_corpus.reset()
    assert one.ngram_corpus._drafting._keys == []
    step(one, batch)
    assert batch[0].tokens == plain(batch[0], len(batch[0].tokens))


def test_corpora_at_run_time_are_refused_in_words(make: Any) -> None:
    corpus = make().ngram_corpus
    assert corpus.list_external_corpora() == {}
    for call in (
        lambda: corpus.load_external_corpus_named("x", []),
        lambda: corpus.remove_external_corpus("x"),
    ):
        with pytest.raises(CapabilityError, match="OUTRIDER_DRAFTER=retrieval"):
            call()


def test_sglang_s_own_table_comes_back(make: Any) -> None:
    """NGRAM in the same process, and a worker that failed, must find it."""
    make()
    with pytest.raises(CapabilityError):
        make("recycling")
    assert stand_in.stand_in.NgramCorpus is stand_in.NgramCorpus


@pytest.mark.parametrize(
    ("drafter", "options", "error", "says"),
    [
        ("sufix", "", ConfigError, "Did you mean 'suffix'?"),
        ("suffix", "max_dept=3", ConfigError, "max_depth"),
        ("draft-model", "", CapabilityError, "SGLang"),
        ("eagle3", "", CapabilityError, "hidden states"),
        ("none", "", ConfigError, "drafts nothing"),
    ],
)
def test_drafters_that_cannot_work_there(
    make: Any, drafter: str, options: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says.replace("?", r"\?")):
        make(drafter, options)


def test_one_token_to_verify_is_no_draft(make: Any) -> None:
    with pytest.raises(ConfigError, match="2 at least, got 1"):
        make(num_tokens=1)


def test_a_drafter_that_varies_is_refused_on_several_ranks(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that draft differently hang SGLang or say wrong texts."""
    make("ngram", ps=SimpleNamespace(tp_size=2))
    monkeypatch.setattr(Drafter, "repeatable", False)
    make("ngram")
    with pytest.raises(CapabilityError, match="must draft alike"):
        make("ngram", ps=SimpleNamespace(tp_size=2))


@pytest.mark.parametrize("what", ["missing", "arguments"])
def test_another_sglang_is_refused_before_it_serves(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    class Other(stand_in.NGRAMWorker):
        _prepare_draft_tokens = None if what == "missing" else (lambda self, batch, more: None)

    module = SimpleNamespace(NGRAMWorker=Other, NgramCorpus=stand_in.NgramCorpus)
    with pytest.raises(CapabilityError, match=f"install sglang {TESTED}"):
        worker.check_interface(module)


# ---------------------------------------------------------------- registration


class Base:
    """SGLang's class for algorithms of plug-ins, in short."""

    def __init__(
        self, name: str, factory: Any, *, supports_overlap: bool, validate_server_args: Any
    ) -> None:
        self.name = name
        self.factory = factory
        self.validate = validate_server_args

    def is_ngram(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        """Nothing by default."""


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two modules of SGLang; returns what is registered."""
    registered: dict[str, Any] = {}
    seen: list[Any] = []
    ngram = SimpleNamespace(
        handle_server_args=seen.append, create_future_map=lambda *given: ("map", *given)
    )

    def register(
        name: str, *, supports_overlap: bool, validate_server_args: Any, spec_class: Any
    ) -> Any:
        def decorate(factory: Any) -> Any:
            registered[name] = spec_class(
                name,
                factory,
                supports_overlap=supports_overlap,
                validate_server_args=validate_server_args,
            )
            return factory

        return decorate

    info = ModuleType(plugin.INFO)
    registry = ModuleType(plugin.REGISTRY)
    info.SpeculativeAlgorithm = SimpleNamespace(register=register, NGRAM=ngram)
    registry.CustomSpecAlgo = Base
    registry.get_spec = registered.get
    monkeypatch.setitem(sys.modules, plugin.INFO, info)
    monkeypatch.setitem(sys.modules, plugin.REGISTRY, registry)
    monkeypatch.setattr(plugin, "import_module", lambda name: sys.modules[name])
    return registered


def test_it_is_registered_once_and_answers_as_ngram(sglang: dict[str, Any]) -> None:
    plugin.register()
    first = sglang["OUTRIDER"]
    plugin.register()
    assert sglang == {"OUTRIDER": first}
    assert first.is_ngram()
    assert not first.has_draft_kv()
    assert first.create_future_map("device") == ("map", "device"), (
        "which the scheduler asks for and the base lacks"
    )
    arguments = SimpleNamespace(
        speculative_ngram_min_bfs_breadth=1, speculative_ngram_max_bfs_breadth=10
    )
    first.handle_server_args(arguments)
    assert (
        arguments.speculative_ngram_min_bfs_breadth,
        arguments.speculative_ngram_max_bfs_breadth,
    ) == (1, 1)


def test_wrong_arguments_are_refused_at_the_start(
    sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()
    check = sglang["OUTRIDER"].validate
    check(SimpleNamespace())
    with pytest.raises(ConfigError, match="rejection-sampling"):
        check(SimpleNamespace(speculative_use_rejection_sampling=True))
    with pytest.raises(ConfigError, match="OUTRIDER_DRAFTER=retrieval"):
        check(SimpleNamespace(speculative_ngram_external_corpus_path="x"))
    monkeypatch.setenv("OUTRIDER_DRAFTER_OPTIONS", "{broken")
    with pytest.raises(ConfigError, match="no JSON object"):
        check(SimpleNamespace())


def test_an_sglang_without_a_registry_is_reported(
    sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules[plugin.REGISTRY], "CustomSpecAlgo")
    with pytest.raises(CapabilityError, match="cannot be registered"):
        plugin.register()


def test_the_entry_point_leads_here() -> None:
    """Skips where the package is not installed with its entry points (an editable install of
    before)."""
    found = [
        one for one in metadata.entry_points(group="sglang.srt.plugins") if one.name == "outrider"
    ]
    if not found:
        pytest.skip("outrider is not installed with this entry point")
    assert found[0].load() is plugin.register
