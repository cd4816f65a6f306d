"""A composite in a draft service learns from acceptance: the text that follows is the verdict on
its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.drafters.base import Drafter
from outrider.drafters.composite import CompositeDrafter
from outrider.drafters.composite_part import Part
from outrider.errors import CapabilityError
from outrider.remote.draft.host import GeneralHost
from outrider.remote.draft.hosted import HostedDrafterOptions, chosen_parts, load_drafter
from outrider.remote.draft.text import row_options
from outrider.remote.draft.texts import HostedText
from outrider.remote.protocol import messages
from outrider.rows import Rows
from outrider.types import Draft
from tests.draft_bench import Bench, Reader, save_draft

VOCAB = 257


class Steps(Drafter):
    """Guesses that a text goes on in steps of `width`."""

    def __init__(self, width: int) -> None:
        self._width = width

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        if not max(gamma):
            return Draft.empty(len(rows), rows.device)
        tokens = torch.tensor(
            [
                [
                    (row.tokens[-1] + (index + 1) * self._width) % VOCAB
                    for index in range(max(gamma))
                ]
                for row in rows
            ]
        )
        return Draft(tokens, torch.tensor(gamma))


class Hosted:
    """Two parts in a composite, in a host; the one called `right` guesses texts of consecutive
    numbers."""

    def __init__(self) -> None:
        self.parts = {
            name: Part(name, Steps(width), is_model=False)
            for name, width in (("wrong", 7), ("right", 1))
        }
        self.host = GeneralHost(
            CompositeDrafter(list(self.parts.values()), "merge"), VOCAB, torch.device("cpu")
        )
        self.texts: dict[int, list[int]] = {}

    def start(self, uid: int, tokens: Sequence[int]) -> None:
        self.texts[uid] = list(tokens)
        self.host.start(
            HostedText(uid, Reader("a"), uid, row_options(messages.Sampling(), VOCAB, 64), VOCAB),
            self.texts[uid],
        )

    def go_on(self, uid: int, count: int) -> None:
        """The text goes on with so many consecutive numbers."""
        text = self.texts[uid]
        tail = [(text[-1] + index + 1) % VOCAB for index in range(count)]
        self.host.change(uid, len(text), tail)
        text += tail

    def shares(self, uid: int, nodes: int = 4) -> tuple[int, int]:
        """(Nodes of the wrong part, of the right one) in a draft, of which one chain is sent."""
        self.host.propose({uid: nodes})
        found = self.host._pending[uid].nodes
        right = sum((token - self.texts[uid][-1]) % VOCAB <= nodes for _, token in found)
        return len(found) - right, right

    def curves(self) -> dict[str, list[float]]:
        return {name: part.survival.curve(4) for name, part in self.parts.items()}


def test_nodes_go_to_the_part_that_texts_agree_with() -> None:
    """For the row itself, and for one that begins later."""
    hosted = Hosted()
    hosted.start(1, [10, 11])
    assert hosted.shares(1) == (2, 2), "nothing is known yet"
    for _ in range(12):
        hosted.go_on(1, 3)
        hosted.shares(1)
    assert hosted.shares(1) == (0, 4)
    hosted.start(2, [100, 101])
    assert hosted.shares(2) == (0, 4)


def test_only_what_the_text_has_reached_is_judged() -> None:
    """Two of four right guesses are known when the text has grown by two; the others may be right
    or wrong."""
    hosted = Hosted()
    expected = Hosted()
    hosted.start(1, [10, 11])
    hosted.shares(1, nodes=8)
    hosted.go_on(1, 2)
    expected.parts["right"].survival.observe(0, 2, 2)
    expected.parts["wrong"].survival.observe(0, 2, 0)
    assert hosted.curves() == expected.curves()


@pytest.mark.parametrize("happens", ["replaced", "stopped", "repeated", "shared again"])
def test_what_was_never_emitted_judges_nothing(happens: str) -> None:
    hosted = Hosted()
    hosted.start(1, [10, 11, 12])
    before = hosted.curves()
    hosted.shares(1)
    if happens == "replaced":
        hosted.host.change(1, 2, [50, 51])
    elif happens == "stopped":
        hosted.host.stop(1)
        hosted.start(1, [10, 11, 12, 13])
    elif happens == "repeated":
        hosted.host.change(1, 3, [])
    else:
        hosted.shares(1)
    assert hosted.curves() == before


def test_a_draft_asked_for_again_is_judged_once() -> None:
    hosted = Hosted()
    expected = Hosted()
    hosted.start(1, [10, 11])
    hosted.shares(1)
    hosted.shares(1)
    hosted.go_on(1, 1)
    hosted.host.change(1, 3, [])
    for name, kept in (("right", 1), ("wrong", 0)):
        expected.parts[name].survival.observe(0, 1, kept)
    assert hosted.curves() == expected.curves()


def test_messages_of_an_asker_are_the_verdicts(tmp_path: Path) -> None:
    """From the protocol's messages to the parts: after texts that repeat, the n-gram part of a real
    service is rated highly."""
    options = {"parts": "suffix,ngram"}
    hosted = load_drafter(
        HostedDrafterOptions(
            model=str(save_draft(tmp_path)), drafter="composite", drafter_options=options
        )
    )
    assert isinstance(hosted.host.drafter, CompositeDrafter)
    parts = {part.name: part for part in hosted.host.drafter.parts}
    first = sum(part.survival.expected(4) for part in parts.values())
    bench = Bench(hosted)
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 2
    reader = bench.reader("a")
    bench.ask(reader, 1, tokens=text, sampling=messages.Sampling(), num_draft_tokens=4)
    for step in range(10):
        tail = [(3 * step + index) % 8 + 1 for index in range(3)]
        bench.ask(reader, 1, base_length=len(text), tokens=tail, num_draft_tokens=4)
        text += tail
    assert sum(part.survival.expected(4) for part in parts.values()) > first + 0.5


def test_the_best_of_a_model_and_others_cannot_be_chosen_elsewhere() -> None:
    """Mode `best` would weigh the model's time against a pass that the service does not see."""
    settings = {"parts": "draft-model,suffix", "mode": "best"}
    with pytest.raises(
        CapabilityError, match="mode=best weighs a model's time against the target's pass"
    ):
        chosen_parts(
            HostedDrafterOptions(
                draft="d", model="t", drafter="composite", drafter_options=settings
            )
        )
    chosen_parts(
        HostedDrafterOptions(
            model="t",
            drafter="composite",
            drafter_options={"parts": "suffix,ngram", "mode": "best"},
        )
    )
