"""Malformed drafts end the step with an error that names the drafter: they would fail elsewhere, or
change the law silently."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.build import Built, Options, build
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import Drafter
from outrider.drafters.composite import CompositeDrafter
from outrider.drafters.composite_part import Part
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.drafters.proposals import laws_checked, proposed
from outrider.engine.drafter_mux import DrafterMux
from outrider.errors import DraftError
from outrider.parts import choose_parts
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers.traversal import TraversalVerifier
from tests.helpers import byte_tokenizer, make_row, save_checkpoint, tiny_llama

VOCAB = 257
NODES = 4
Change = Callable[[Draft], Draft]


def drawn(num_rows: int) -> Draft:
    """A sound draft: a chain of four, drawn evenly from the first eight tokens."""
    probs = torch.zeros(num_rows, NODES + 1, VOCAB)
    probs[..., :8] = 1 / 8
    tokens = torch.arange(NODES).expand(num_rows, NODES).contiguous()
    return Draft(
        tokens,
        torch.full((num_rows,), NODES),
        torch.arange(-1, NODES - 1).expand_as(tokens).contiguous(),
        probs,
    )


class Malformed(Drafter):
    """Drafts what a test makes of a sound draft."""

    def __init__(self, change: Change = lambda draft: draft) -> None:
        self.change = change

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        return self.change(drawn(len(rows))) if any(gamma) else Draft.empty(len(rows))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder: Path = save_checkpoint(
        tmp_path_factory.mktemp("model"), tiny_llama(VOCAB), byte_tokenizer()
    )
    threads = torch.get_num_threads()
    yield build(
        Options(target=str(folder), drafter="none", dtype="float32", runtime="eager", threads=1)
    )
    torch.set_num_threads(threads)


@pytest.fixture
def step(built: Built) -> Iterator[Callable[[Drafter], list[int]]]:
    """A step of two sampled rows."""
    decoders: list[Decoder] = []

    def stepped(drafter: Drafter) -> list[int]:
        decoders.append(Decoder(built.target.lm, drafter, TraversalVerifier(), FixedLength(NODES)))
        for number in range(2):
            decoders[0].add(
                make_row([5, 6, 7], SamplingParams(max_tokens=30, temperature=1.0), number=number)
            )
        return decoders[0].step()

    yield stepped
    while len(decoders[0].rows):
        decoders[0].remove(0)


def with_(name: str, row: int, index: Any, value: Any) -> Change:
    """A draft with one number of one tensor changed."""

    def change(draft: Draft) -> Draft:
        tensor = getattr(draft, name).clone()
        tensor[row][index] = value
        return replace(draft, **{name: tensor})

    return change


NODE_FAULTS: list[tuple[Change, str]] = [
    (
        with_("tokens", 1, 2, VOCAB),
        r"drafted token 257 as node 2 of row 1; the target's tokens are 0 to 256",
    ),
    (with_("tokens", 0, 0, -1), r"drafted token -1 as node 0 of row 0"),
    (lambda draft: replace(draft, tokens=draft.tokens.float()), "int64 in .2, nodes. is expected"),
    (lambda draft: replace(draft, tokens=draft.tokens[:1]), r"in shape \(1, 4\)"),
    (lambda draft: replace(draft, lengths=draft.lengths[:1]), r"'lengths' in shape \(1,\)"),
    (
        lambda draft: replace(draft, lengths=draft.lengths + 1),
        "drafted 5 nodes for row 0, .* with room for 4",
    ),
    (lambda draft: replace(draft, lengths=draft.lengths - 5), "drafted -1 nodes for row 0"),
    (
        with_("parents", 1, 2, 2),
        r"node 2 of row 1 with parent 2: .* so -1 \(the pending token\) to 1 is expected",
    ),
    (with_("parents", 0, 1, 3), "node 1 of row 0 with parent 3"),
    (with_("parents", 0, 0, -2), "node 0 of row 0 with parent -2"),
    (
        lambda draft: replace(draft, probs=draft.probs[:, :, :9]),
        r"'probs' in shape \(2, 5, 9\); \(2, 5, 257\) is expected",
    ),  # type: ignore[index]
    (lambda draft: replace(draft, sampled=torch.ones(2, 3).bool()), r"'sampled' in shape \(2, 3\)"),
]
LAW_FAULTS: list[tuple[Change, str]] = [
    (
        with_("probs", 1, (2, 100), float("nan")),
        r"NaN or infinity in the distribution of node 2 of row 1 \(probs\[1, 2\]\)",
    ),
    (
        with_("probs", 0, (0, 100), float("inf")),
        "NaN or infinity in the distribution of node 0 of row 0",
    ),
    (
        with_("probs", 0, (1, 100), -0.5),
        r"negative probability \(-0.5\) in the distribution of node 1 of row 0",
    ),
    (
        lambda draft: replace(draft, probs=2 * draft.probs),
        "sum to 2, not 1, in the distribution of node 0 of row 0",
    ),  # type: ignore[operator]
    (lambda draft: replace(draft, probs=draft.probs**0.9), "sum to 1.23"),  # type: ignore[operator]
    (
        with_("tokens", 1, 3, 200),
        "drew token 200, whose probability is 0, by the distribution of node 3 of row 1",
    ),
    (
        lambda draft: replace(draft, parents=draft.parents * 0 - 1, tokens=draft.tokens * 0),
        "drew token 0 twice among siblings",
    ),  # type: ignore[operator]
    (
        lambda draft: replace(draft, probs=None, sampled=torch.ones(2, NODES).bool()),
        "was drawn, and gives no 'probs'",
    ),
    (lambda draft: replace(draft, probs=draft.probs.long()), "'probs' of torch.int64"),  # type: ignore[union-attr]
]


@pytest.mark.parametrize(("change", "message"), NODE_FAULTS)
def test_ids_parents_and_numbers_are_checked_always(
    step: Callable[[Drafter], list[int]], change: Change, message: str
) -> None:
    with pytest.raises(DraftError, match=f"drafter 'Malformed' .*{message}"):
        step(Malformed(change))


@pytest.mark.parametrize(("change", "message"), LAW_FAULTS)
def test_laws_are_checked_where_asked(
    step: Callable[[Drafter], list[int]], change: Change, message: str
) -> None:
    with laws_checked(), pytest.raises(DraftError, match=f"drafter 'Malformed' .*{message}"):
        step(Malformed(change))


def test_more_nodes_than_asked_for_are_refused(step: Callable[[Drafter], list[int]]) -> None:
    """A budget is the room that is left in the context, or under a request's limit."""
    rows = Rows(VOCAB, torch.device("cpu"))
    for number in range(2):
        rows.add(make_row([5, 6], SamplingParams(), number=number))
    with pytest.raises(
        DraftError, match="drafted 4 nodes for row 1, which was asked for 3 at most"
    ):
        proposed(Malformed(), rows, [4, 3])
    assert step(Malformed())


def test_sound_drafts_pass(step: Callable[[Drafter], list[int]]) -> None:
    """What nothing was drawn by may be anything: no verifier looks at it, and it costs to fill."""

    def change(draft: Draft) -> Draft:
        changed = with_("probs", 0, (NODES,), float("nan"))(draft)
        return replace(
            with_("probs", 1, slice(2, None), 7.0)(changed), lengths=torch.tensor([4, 2])
        )

    with laws_checked():
        assert len(step(Malformed(change))) == 2


def test_siblings_may_repeat_a_token_where_the_draft_says_so(
    step: Callable[[Drafter], list[int]],
) -> None:
    def change(draft: Draft) -> Draft:
        assert draft.parents is not None
        return replace(
            draft, parents=draft.parents * 0 - 1, tokens=draft.tokens * 0, replacement=True
        )

    with laws_checked():
        assert len(step(Malformed(change))) == 2


class Misled(NgramDrafter):
    """A third party's, inside others."""

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        return Draft(
            torch.full((len(rows), 1), VOCAB),
            torch.ones(len(rows), dtype=torch.int64).clamp(max=max(gamma)),
        )


@pytest.mark.parametrize(
    "made",
    [
        lambda: DrafterMux({"a": Misled(), "b": Misled()}, "a"),
        lambda: CompositeDrafter(
            [Part("a", Misled(), False), Part("b", NgramDrafter(), False)], "merge"
        ),
    ],
    ids=["mux", "composite"],
)
def test_parts_are_named_themselves(
    step: Callable[[Drafter], list[int]], made: Callable[[], Drafter]
) -> None:
    """Not what put their drafts together."""
    with pytest.raises(DraftError, match="drafter 'Misled' drafted token 257"):
        step(made())


@pytest.mark.parametrize("drafter", ["ngram", "composite"])
def test_names_are_those_of_the_table(
    built: Built, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """As the user knows them; of a composite, the part's."""
    options = {"parts": "suffix,ngram"} if drafter == "composite" else {}
    made = choose_parts(drafter, options, "auto", {}, None, lossy=False).make_drafter(
        built.target, None
    )
    rows = Rows(VOCAB, torch.device("cpu"))
    made.join(rows, make_row([5, 6], SamplingParams()))
    monkeypatch.setattr(NgramDrafter, "propose", Misled.propose)
    with pytest.raises(DraftError, match="drafter 'ngram' drafted token 257"):
        proposed(made, rows, [4])


@pytest.mark.slow
@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_the_environment_switches_laws_on(value: str, expected: bool) -> None:
    code = "from outrider.drafters.proposals import _Laws; print(_Laws.are_checked)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"OUTRIDER_CHECK_DRAFTS": value, "PYTHONPATH": ":".join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(expected)


def test_what_is_checked_always_costs_nothing_measurable() -> None:
    """Catches a check by operations of torch: of one row a step of the fastest model takes 300 us
    and more."""
    rows = Rows(VOCAB, torch.device("cpu"))
    rows.add(make_row([5, 6], SamplingParams()))
    draft = replace(drawn(1), probs=None)

    class Given(Malformed):
        def propose(self, rows: Rows, gamma: list[int]) -> Draft:
            return draft

    drafter = Given()
    times = []
    for _ in range(200):
        began = time.perf_counter()
        proposed(drafter, rows, [NODES])
        times.append(time.perf_counter() - began)
    assert min(times) < 100e-6
