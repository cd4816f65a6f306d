"""A draft service without a wire, driven turn by turn: for tests of what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from outrider.drafters.model.draft_model import ModelDrafter
from outrider.remote.draft.counters import DraftCounters
from outrider.remote.draft.host import drafted_nodes, row_of
from outrider.remote.draft.hosted import HostedDrafter, HostedDrafterOptions, load_drafter
from outrider.remote.draft.text import row_options
from outrider.remote.draft.texts import DraftLimits, HostedText, HostedTexts
from outrider.remote.draft.worker import Worker
from outrider.remote.protocol import messages
from outrider.rows import Rows
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

VOCAB = 257
MAX_TURNS = 200


def save_draft(folder: Path, **changes: Any) -> Path:
    """A random draft model in fp32, sharp enough for greedy text to be other than one token over
    and over."""
    return save_checkpoint(
        folder, tiny_llama(VOCAB, seed=3, sharpness=4.0, **changes), byte_tokenizer()
    )


def hosted_model(folder: Path, **changes: Any) -> HostedDrafter:
    """A service's drafter from this model."""
    return load_drafter(
        HostedDrafterOptions(draft=str(folder), dtype="float32", runtime="eager", **changes)
    )


@dataclass(eq=False)
class Reader:
    """An asker's stream that keeps what comes."""

    name: str
    replies: list[messages.RowReply] = field(default_factory=list)

    def send(self, replies: list[messages.RowReply]) -> None:
        """As a stream takes them."""
        self.replies += replies


class Bench:
    """A service's parts, without a thread and a wire."""

    def __init__(self, hosted: HostedDrafter, **limits: Any) -> None:
        self.hosted = hosted
        self.limits = DraftLimits(**limits)
        for uid in list(hosted.host.uids):  # of the bench before
            hosted.host.stop(uid)
        self.counters = DraftCounters(CollectorRegistry())
        self.texts = HostedTexts(self.limits, hosted.vocab_size, hosted.max_context)
        self.worker = Worker(
            hosted.host, self.texts, self.limits, self.counters, hosted.max_context
        )

    def reader(self, name: str) -> Reader:
        """An asker that has opened a stream."""
        reader = Reader(name)
        self.texts.connect(reader)
        return reader

    def tell(self, reader: Reader, **fields: Any) -> messages.RowReply | None:
        """One message about a row; the trouble that is answered at once."""
        return self.texts.receive(reader, messages.RowRequest(**fields))

    def turns(self, reader: Reader, row: int) -> messages.RowReply:
        """Turns until a reply about this row comes."""
        for _ in range(MAX_TURNS):
            self.worker.turn()
            about_row = [reply for reply in reader.replies if reply.row == row]
            if about_row:
                (reply,) = about_row
                reader.replies.remove(reply)
                return reply
        raise AssertionError(f"no reply about row {row} after {MAX_TURNS} turns")

    def ask(self, reader: Reader, row: int, **fields: Any) -> messages.RowReply:
        """Tell, and the reply."""
        assert self.tell(reader, row=row, **fields) is None
        return self.turns(reader, row)

    def forget(self, reader: Reader, row: int) -> None:
        """Evict a row, if it is there."""
        held = [text for text in self.texts._askers[reader].rows.values() if text.number == row]
        for text in held:
            self.texts.remove(text)

    def total(self, name: str) -> float:
        """A counter's sum over its labels."""
        metrics = self.counters.registry.collect()
        return sum(
            s.value
            for m in metrics
            for s in m.samples
            if s.name == f"outrider:draft_service_{name}_total"
        )


def chain_of(reply: messages.RowReply) -> list[int]:
    """Tokens of a chain."""
    return [node.token for node in reply.nodes]


def probs_of(node: messages.Node, vocab_size: int = VOCAB) -> torch.Tensor:
    """(V,) fp32."""
    probs = torch.zeros(vocab_size)
    probs[list(node.distribution.tokens)] = torch.tensor(list(node.distribution.probs))
    return probs


@torch.inference_mode()
def fresh_chain(
    hosted: HostedDrafter, tokens: list[int], sampling: messages.Sampling, count: int
) -> list[messages.Node]:
    """What the drafter proposes in one process for this text, read from its beginning by a model
    with an empty cache."""
    drafter = ModelDrafter(hosted.host.lm.twin())
    row = row_of(
        HostedText(
            0,
            Reader("fresh"),
            0,
            row_options(sampling, VOCAB, DraftLimits().distribution_tokens),
            VOCAB,
        ),
        tokens,
    )
    rows = Rows(VOCAB, torch.device("cpu"))
    rows.add(row)
    drafter.start(row)
    return drafted_nodes(drafter.propose(rows, [count]), rows)[0]
