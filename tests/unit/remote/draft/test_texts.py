"""What askers tell a draft service: tokens that agree, differ or are missing, limits, turns, and
messages that make no sense."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.drafters.model.draft_model import ModelDrafter
from outrider.errors import ConfigError, NumericalError
from outrider.kv.cache import BLOCK, KVCache, LayerShape
from outrider.models.lm import PREFILL_CHUNK
from outrider.remote.draft.host import ModelHost
from outrider.remote.draft.hosted import HostedDrafter
from outrider.remote.draft.texts import DraftLimits, HostedTexts, Job, common
from outrider.remote.protocol import messages
from tests.draft_bench import VOCAB, Bench, Reader, chain_of, fresh_chain, hosted_model, save_draft

GREEDY = messages.Sampling()
TEXT = [5, 6, 7, 8]


class Desk:
    """A table and its askers, without a drafter."""

    def __init__(self, **limits: Any) -> None:
        self.table = HostedTexts(DraftLimits(**limits), VOCAB, 64)

    def reader(self, name: str) -> Reader:
        """An asker with a stream."""
        reader = Reader(name)
        self.table.connect(reader)
        return reader

    def tell(
        self, reader: Reader, row: int, tokens: list[int], **more: Any
    ) -> messages.RowReply | None:
        """One message that wants a draft."""
        return self.table.receive(
            reader, messages.RowRequest(row=row, tokens=tokens, **{"num_draft_tokens": 3, **more})
        )

    def jobs(self, limit: int = 100) -> list[Job]:
        """The rows whose turn it is."""
        return self.table.take(limit)


def trouble_of(reply: messages.RowReply | None) -> int:
    """What was wrong; 0: nothing."""
    return 0 if reply is None else reply.trouble


def test_tokens_that_agree_change_nothing_and_others_replace() -> None:
    """Jobs carry the position from which a text differs; waiting ones are merged."""
    desk = Desk()
    reader = desk.reader("a")
    assert desk.tell(reader, 1, TEXT, sampling=GREEDY) is None
    (job,) = desk.jobs()
    assert (job.start, job.tail) == (0, TEXT)
    assert desk.tell(reader, 1, [7, 8], base_length=2) is None
    (job,) = desk.jobs()
    assert (job.start, job.tail) == (4, [])
    assert desk.tell(reader, 1, [8, 9], base_length=3) is None
    assert desk.tell(reader, 1, [1, 1], base_length=2) is None
    (job,) = desk.jobs()
    assert (job.start, job.tail) == (2, [1, 1])
    assert (
        desk.tell(reader, 1, [], base_length=3) is None
    )  # what is after it is replaced by nothing
    (job,) = desk.jobs()
    assert (job.start, job.tail) == (3, [])


@pytest.mark.parametrize(
    ("text", "start", "tokens", "same"),
    [
        ([1, 2, 3], 0, [1, 2, 3], 3),
        ([1, 2, 3], 1, [2, 4], 1),
        ([1, 2, 3], 2, [3, 4, 5], 1),
        ([1], 1, [2], 0),
        ([1, 2], 0, [], 0),
    ],
)
def test_common_beginnings(text: list[int], start: int, tokens: list[int], same: int) -> None:
    """Counted from `start` on."""
    assert common(text, start, tokens) == same


def test_lost_messages_and_forgotten_rows_are_noticed() -> None:
    """Each with what the asker has to send."""
    desk = Desk()
    reader = desk.reader("a")
    assert trouble_of(desk.tell(reader, 1, TEXT)) == messages.TROUBLE_UNKNOWN_ROW
    assert (
        trouble_of(desk.tell(reader, 1, TEXT, base_length=2, sampling=GREEDY))
        == messages.TROUBLE_MISSING_TOKENS
    )
    assert desk.tell(reader, 1, TEXT, sampling=GREEDY) is None
    reply = desk.tell(reader, 1, [9], base_length=6)
    assert reply is not None
    assert (reply.trouble, reply.have_length) == (messages.TROUBLE_MISSING_TOKENS, 4)
    assert desk.table.receive(reader, messages.RowRequest(row=1, end=True)) is None
    assert trouble_of(desk.tell(reader, 1, [9], base_length=4)) == messages.TROUBLE_UNKNOWN_ROW
    assert not desk.jobs()


WRONG = [
    ({"tokens": [VOCAB]}, "token 257 is outside the vocabulary of 257"),
    ({"tokens": [2**32 - 1]}, "outside the vocabulary"),
    ({"tokens": []}, "without a token"),
    ({"tokens": [1] * 65}, "65 tokens, and the drafter has room for 64"),
    ({"sampling": messages.Sampling(temperature=-1)}, "temperature"),
    ({"sampling": messages.Sampling(temperature=math.nan)}, "temperature"),
    ({"sampling": messages.Sampling(temperature=math.inf)}, "temperature"),
    ({"sampling": messages.Sampling(top_p=1.5)}, "top_p"),
    ({"sampling": messages.Sampling(top_k=-7)}, "top_k"),
    ({"sampling": messages.Sampling(min_p=-0.1)}, "min_p"),
    ({"sampling": messages.Sampling(repetition_penalty=-1)}, "repetition_penalty"),
    ({"sampling": messages.Sampling(frequency_penalty=9)}, "frequency_penalty"),
    ({"sampling": messages.Sampling(logit_bias={1: math.nan})}, "logit_bias"),
    ({"sampling": messages.Sampling(allowed_token_ids=[VOCAB])}, "no allowed token"),
]


@pytest.mark.parametrize(("fields", "reason"), WRONG)
def test_nonsense_is_refused_in_words(fields: dict[str, Any], reason: str) -> None:
    """An invalid message is refused with a reason, and its row is dropped; the others continue."""
    desk = Desk()
    reader = desk.reader("a")
    assert desk.tell(reader, 2, TEXT, sampling=GREEDY) is None
    reply = desk.tell(reader, 1, **{"tokens": TEXT, "sampling": GREEDY, **fields})
    assert reply is not None
    assert reply.trouble == messages.TROUBLE_REFUSED
    assert reason in reply.reason
    assert [job.text.number for job in desk.jobs()] == [2]
    assert desk.table.num_rows() == 1


def test_a_base_beyond_everything_is_a_lost_message() -> None:
    """Not an allocation."""
    desk = Desk()
    reader = desk.reader("a")
    assert desk.tell(reader, 1, TEXT, sampling=GREEDY) is None
    assert (
        trouble_of(desk.tell(reader, 1, [1], base_length=2**64 - 1))
        == messages.TROUBLE_MISSING_TOKENS
    )


def test_askers_have_turns() -> None:
    """One with many rows does not keep another waiting, and the first one changes from batch to
    batch."""
    desk = Desk()
    many = desk.reader("many")
    few = desk.reader("few")
    for row in range(20):
        assert desk.tell(many, row, TEXT, sampling=GREEDY) is None
    for row in range(2):
        assert desk.tell(few, row, TEXT, sampling=GREEDY) is None
    first = [(cast(Reader, job.text.stream).name, job.text.number) for job in desk.jobs(4)]
    assert first == [("many", 0), ("few", 0), ("many", 1), ("few", 1)]
    assert desk.tell(few, 0, [1], base_length=4) is None
    assert desk.jobs(1)[0].text.stream is few
    assert len(desk.jobs()) == 18


def test_the_newest_request_of_a_row_replaces_the_one_that_waits() -> None:
    """Nothing is drafted for a text that has grown since."""
    desk = Desk()
    reader = desk.reader("a")
    assert desk.tell(reader, 1, TEXT, sampling=GREEDY) is None
    (old,) = desk.jobs()
    desk.table.put_back(old)
    assert desk.jobs() == [replace(old, start=4, tail=[])]
    for length in range(4, 9):
        assert desk.tell(reader, 1, [length], base_length=length) is None
    desk.table.put_back(old)
    (job,) = desk.jobs()
    assert (job.start, job.tail) == (4, [4, 5, 6, 7, 8])
    # committed, and nothing wanted
    assert desk.tell(reader, 1, [1], base_length=9, num_draft_tokens=0) is None
    desk.table.put_back(job)
    assert not desk.jobs()


def test_rows_are_bounded_for_each_asker_by_itself() -> None:
    """The service is busy for more of them."""
    desk = Desk(max_rows=2)
    reader = desk.reader("a")
    other = desk.reader("b")
    for row in range(2):
        assert desk.tell(reader, row, TEXT, sampling=GREEDY) is None
    assert trouble_of(desk.tell(reader, 2, TEXT, sampling=GREEDY)) == messages.TROUBLE_BUSY
    assert desk.tell(other, 0, TEXT, sampling=GREEDY) is None
    assert desk.table.num_waiting() == 3


def test_texts_go_with_their_asker() -> None:
    """Nobody waits for them any more."""
    desk = Desk()
    gone = desk.reader("a")
    assert desk.tell(gone, 1, TEXT, sampling=GREEDY) is None
    desk.table.disconnect(gone)
    assert not desk.jobs()
    assert len(desk.table.gone()) == 1


def test_an_asker_with_a_narrow_vocabulary_is_held_to_it() -> None:
    """Its width comes with the row, and bounds what follows."""
    desk = Desk()
    reader = desk.reader("a")
    narrow = messages.Sampling(vocab_size=8)
    assert trouble_of(desk.tell(reader, 1, TEXT, sampling=narrow)) == messages.TROUBLE_REFUSED
    assert desk.tell(reader, 1, TEXT[:3], sampling=narrow) is None
    reply = desk.tell(reader, 1, [8], base_length=3)
    assert reply is not None
    assert "outside the vocabulary of 8" in reply.reason


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> HostedDrafter:
    """A random model in a service."""
    return hosted_model(save_draft(tmp_path_factory.mktemp("draft")))


def test_windows_of_a_draft_model_save_memory() -> None:
    """Catches texts that are refused, or forgotten, for memory that they would not take."""
    kv = KVCache([LayerShape(1, 2, 2, window=16)] * 5 + [LayerShape(1, 2, 2)], torch.float32, "cpu")
    host = ModelHost(cast(ModelDrafter, SimpleNamespace(lm=SimpleNamespace(kv=kv))), VOCAB)
    # a block after 4,000 tokens for passes; two where windows forget
    needed = (9 + 5 * 2) * BLOCK * 4 * 4
    assert not host.has_room([1], [4000], needed - 1)
    assert host.has_room([1], [4000], needed)
    kv.reserve(1, 4000 + PREFILL_CHUNK)
    assert kv.allocated_bytes == needed


@pytest.mark.slow
def test_memory_is_kept_to(hosted: HostedDrafter) -> None:
    """Texts that were asked about longest ago make room; one that cannot fit at all is refused."""
    kv = hosted.host.lm.kv
    bench = Bench(hosted, memory_bytes=4 * 512 * kv.bytes_per_token)
    kv.shrink(1, 512)
    reader = bench.reader("a")
    for row in range(6):
        reply = bench.ask(reader, row, tokens=[*TEXT, row], sampling=GREEDY, num_draft_tokens=2)
        assert chain_of(reply) == [
            node.token for node in fresh_chain(hosted, [*TEXT, row], GREEDY, 2)
        ]
        assert kv.allocated_bytes <= bench.limits.memory_bytes
    assert bench.total("evictions") == 2
    assert [
        trouble_of(bench.tell(reader, row=row, base_length=5, tokens=[9])) for row in range(6)
    ] == [1, 1, 0, 0, 0, 0]
    long = [index % VOCAB for index in range(900)]
    reply = bench.ask(reader, 7, tokens=long, sampling=GREEDY, num_draft_tokens=2)
    assert chain_of(reply) == [node.token for node in fresh_chain(hosted, long, GREEDY, 2)]
    assert kv.allocated_bytes <= bench.limits.memory_bytes
    reply = bench.ask(reader, 8, tokens=[1] * 2000, sampling=GREEDY, num_draft_tokens=2)
    assert reply.trouble == messages.TROUBLE_REFUSED
    assert "--memory" in reply.reason


@pytest.mark.slow
def test_a_text_that_fits_alone_is_busy_and_no_more(hosted: HostedDrafter) -> None:
    """Catches a text that is never drafted for again because others of its batch took all memory
    once."""
    long = [index % VOCAB for index in range(900)]
    bench = Bench(hosted, memory_bytes=hosted.host.least_bytes([901]))
    hosted.host.lm.kv.shrink(1, 512)
    reader = bench.reader("a")
    for row in range(2):
        assert (
            bench.tell(reader, row=row, tokens=[*long, row], sampling=GREEDY, num_draft_tokens=2)
            is None
        )
    assert bench.turns(reader, 0).trouble == messages.TROUBLE_NONE
    reply = bench.turns(reader, 1)
    assert reply.trouble == messages.TROUBLE_BUSY
    assert reply.reason == "no room for 901 tokens alongside the others (--memory)"
    assert (
        trouble_of(bench.tell(reader, row=1, base_length=901, num_draft_tokens=2))
        == messages.TROUBLE_UNKNOWN_ROW
    )
    reply = bench.ask(reader, 1, tokens=[*long, 1], sampling=GREEDY, num_draft_tokens=2)
    assert reply.trouble == messages.TROUBLE_NONE
    reply = bench.ask(reader, 2, tokens=[1] * 2000, sampling=GREEDY, num_draft_tokens=2)
    assert reply.trouble == messages.TROUBLE_REFUSED, "it will never fit"


@pytest.mark.parametrize(("newer", "is_sent"), [([9], True), ([], True), (None, False)])
def test_a_draft_that_is_overtaken_is_sent_where_its_text_still_holds(
    hosted: HostedDrafter, monkeypatch: pytest.MonkeyPatch, newer: list[int] | None, is_sent: bool
) -> None:
    """A service slower than the asker's steps must answer, too. Tokens that were replaced meanwhile
    (None) make it useless."""
    bench = Bench(hosted)
    reader = bench.reader("a")
    propose = hosted.host.propose

    def slow(asks: dict[int, int]) -> Any:
        drafts = propose(asks)
        monkeypatch.setattr(hosted.host, "propose", propose)
        base, tokens = (2, [11]) if newer is None else (4, newer)
        assert (
            bench.tell(reader, row=1, base_length=base, tokens=tokens, num_draft_tokens=2) is None
        )
        return drafts

    monkeypatch.setattr(hosted.host, "propose", slow)
    assert bench.tell(reader, row=1, tokens=TEXT, sampling=GREEDY, num_draft_tokens=2) is None
    bench.worker.turn()
    chains = [(reply.base_length, chain_of(reply)) for reply in reader.replies]
    expected = [node.token for node in fresh_chain(hosted, TEXT, GREEDY, 2)]
    assert chains == ([(4, expected)] if is_sent else [])
    reader.replies.clear()
    bench.worker.turn()
    text = [*TEXT[:2], 11] if newer is None else [*TEXT, *newer]
    (reply,) = reader.replies
    assert reply.base_length == len(text)
    if newer != []:  # a request about the present text again gets what was not sent yet: nothing
        assert chain_of(reply) == [node.token for node in fresh_chain(hosted, text, GREEDY, 2)]


def test_a_second_request_for_a_base_has_the_whole_chain(hosted: HostedDrafter) -> None:
    """Asked for more nodes, it begins with those that were sent."""
    bench = Bench(hosted)
    reader = bench.reader("a")
    first = bench.ask(reader, 1, tokens=TEXT, sampling=GREEDY, num_draft_tokens=2)
    more = bench.ask(reader, 1, base_length=4, tokens=[], num_draft_tokens=4)
    assert chain_of(more)[:2] == chain_of(first)
    assert len(more.nodes) == 4


def test_a_row_that_breaks_the_drafter_is_refused_alone(
    hosted: HostedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The neighbours of a broken row still get their drafts."""
    bench = Bench(hosted)
    reader = bench.reader("a")
    propose = hosted.host.propose
    bad = 250

    def breaking(asks: dict[int, int]) -> Any:
        if any(bad in hosted.host.tokens(uid) for uid in asks):
            raise NumericalError("the logits are NaN")
        return propose(asks)

    monkeypatch.setattr(hosted.host, "propose", breaking)
    for row, last in enumerate([9, bad, 10]):
        assert (
            bench.tell(reader, row=row, tokens=[*TEXT, last], sampling=GREEDY, num_draft_tokens=2)
            is None
        )
    bench.worker.turn()
    replies = {reply.row: reply for reply in reader.replies}
    assert replies[1].trouble == messages.TROUBLE_REFUSED
    assert "NaN" in replies[1].reason
    for row, last in ((0, 9), (2, 10)):
        assert chain_of(replies[row]) == [
            node.token for node in fresh_chain(hosted, [*TEXT, last], GREEDY, 2)
        ]
    assert bench.texts.num_rows() == 2


LIMITS = ("max_draft_tokens", "batch_size", "max_rows", "distribution_tokens", "memory_bytes")


@pytest.mark.parametrize("field", LIMITS)
def test_limits_are_checked(field: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=field):
        DraftLimits(**{field: -1})


@pytest.mark.slow
def test_a_model_of_another_width_than_the_askers(tmp_path: Path) -> None:
    """An asker's padded vocabulary may be wider: its committed tokens are taken."""
    hosted = hosted_model(save_draft(tmp_path))
    bench = Bench(hosted)
    wide = messages.Sampling(vocab_size=VOCAB + 63)
    reader = bench.reader("wide")
    reply = bench.ask(reader, 1, tokens=[*TEXT, VOCAB + 3], sampling=wide, num_draft_tokens=2)
    assert len(reply.nodes) == 2
