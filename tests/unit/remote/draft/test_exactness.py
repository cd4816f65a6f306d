"""A draft service sends what the drafter would draft in one process, whatever was sent, lost,
replaced or forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from outrider.drafters.model.draft_model import ModelDrafter
from outrider.remote.draft.hosted import HostedDrafter
from outrider.remote.protocol import messages
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from tests.draft_bench import (
    VOCAB,
    Bench,
    chain_of,
    fresh_chain,
    hosted_model,
    probs_of,
    save_draft,
)
from tests.helpers import make_row

PROMPT = [5, 17, 250, 3, 99, 31, 7]
SAMPLINGS = {
    "greedy": messages.Sampling(),
    "drawn": messages.Sampling(temperature=0.9, seed=11),
    "filtered": messages.Sampling(temperature=1.3, top_k=9, min_p=0.02, seed=12),
    "nucleus": messages.Sampling(temperature=1.0, top_p=0.8, seed=13),
    "penalised": messages.Sampling(
        temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.5, seed=14, num_prompt=7
    ),
    "greedy, penalised": messages.Sampling(presence_penalty=1.5, num_prompt=7),
    "biased": messages.Sampling(
        temperature=1.0, logit_bias={4: 3.0}, allowed_token_ids=[4, 5, 6, 7, 8, 9], seed=15
    ),
    "coupled": messages.Sampling(temperature=1.0, seed=16, coupled=True),
    "deterministic": messages.Sampling(temperature=1.0, seed=17, deterministic=True),
}


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> HostedDrafter:
    """A random model in a service."""
    return hosted_model(save_draft(tmp_path_factory.mktemp("draft")))


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_chains_are_those_of_one_process(hosted: HostedDrafter, kind: str) -> None:
    """Guards against another order of draws, filters or noise than the drafter's own; with
    distributions where tokens are drawn."""
    bench = Bench(hosted)
    reply = bench.ask(
        bench.reader("a"), 1, tokens=PROMPT, sampling=SAMPLINGS[kind], num_draft_tokens=6
    )
    expected = fresh_chain(hosted, PROMPT, SAMPLINGS[kind], 6)
    assert chain_of(reply) == [node.token for node in expected]
    assert len(expected) == 6
    is_drawn = kind in ("drawn", "filtered", "nucleus", "penalised", "biased")
    for ours, theirs in zip(reply.nodes, expected, strict=True):
        assert ours.HasField("distribution") == is_drawn == bool(ours.distribution.tokens)
        assert ours.distribution.tokens == theirs.distribution.tokens
        if is_drawn:
            assert sum(ours.distribution.probs) == pytest.approx(1, abs=1e-5)
            assert ours.token in ours.distribution.tokens


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, seed=11),
        SamplingParams(temperature=1.3, top_k=100, min_p=0.001, seed=11),
    ],
)
def test_distributions_are_the_drafters_cut_and_scaled(
    hosted: HostedDrafter, params: SamplingParams
) -> None:
    """A distribution is the draft's own, its likeliest tokens alone, scaled to sum 1 before the
    token is drawn from it."""
    max_tokens = 20
    bench = Bench(hosted, distribution_tokens=max_tokens)
    sampling = messages.Sampling(
        temperature=params.temperature, top_k=params.top_k, min_p=params.min_p, seed=11
    )
    reply = bench.ask(bench.reader("a"), 1, tokens=PROMPT, sampling=sampling, num_draft_tokens=1)
    row = make_row(PROMPT, params)
    rows = Rows(VOCAB, torch.device("cpu"))
    rows.add(row)
    drafter = ModelDrafter(hosted.host.lm.twin())
    drafter.start(row)
    with torch.inference_mode():
        probs = drafter.propose(rows, [1]).probs[0, 0]  # type: ignore[index]
    kept = probs.topk(max_tokens)
    cut = torch.zeros(VOCAB).index_copy(0, kept.indices, kept.values / kept.values.sum())
    torch.testing.assert_close(probs_of(reply.nodes[0]), cut, atol=1e-6, rtol=1e-4)
    assert (probs > 0).sum() > max_tokens


class Asker:
    """The client's side of two rows of one asker: its text, and whether the service knows the
    row."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.reader = bench.reader(name)
        self.texts: dict[int, list[int]] = {}
        self.chains: dict[int, list[int]] = {}

    def commit(
        self, bench: Bench, row: int, base: int, tokens: list[int], sampling: messages.Sampling
    ) -> list[int]:
        """Tell of tokens as a client does, answering troubles; the draft."""
        text = self.texts[row] = self.texts.get(row, [])[:base] + tokens
        reply = bench.tell(
            self.reader, row=row, base_length=base, tokens=tokens, num_draft_tokens=4
        )
        if reply is not None and reply.trouble == messages.TROUBLE_UNKNOWN_ROW:
            reply = bench.tell(
                self.reader, row=row, tokens=text, sampling=sampling, num_draft_tokens=4
            )
        elif reply is not None:
            assert reply.trouble == messages.TROUBLE_MISSING_TOKENS
            have = reply.have_length
            reply = bench.tell(
                self.reader, row=row, base_length=have, tokens=text[have:], num_draft_tokens=4
            )
        assert reply is None
        self.chains[row] = chain_of(bench.turns(self.reader, row))
        return self.chains[row]


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["advance", "replace", "repeat", "lose", "evict", "restart", "reconnect"]),
        st.integers(0, 1),  # asker
        st.integers(0, 1),  # row
        st.integers(0, 4),  # how many of the chain are kept, or where the text is replaced
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    moves=MOVES, kinds=st.tuples(st.sampled_from(list(SAMPLINGS)), st.sampled_from(list(SAMPLINGS)))
)
def test_drafts_equal_those_of_a_fresh_row(
    hosted: HostedDrafter, moves: list, kinds: tuple[str, str]
) -> None:
    """Commits, replaced texts, repeated and lost messages, evictions and restarts leave no trace in
    the drafts.

    Rows of two clients under one number are not mixed."""
    bench = Bench(hosted, batch_size=3)
    askers = [Asker(bench, "a"), Asker(bench, "b")]
    for kind, number, row, kept, tokens in moves:
        asker = askers[number]
        sampling = SAMPLINGS[kinds[row]]
        text = asker.texts.get(row)
        chain = asker.chains.get(row, [])
        base = 0 if text is None else len(text)
        if text is None or kind == "restart":
            if kind == "restart":
                bench = Bench(hosted, batch_size=3)
                for other in askers:
                    other.reader = bench.reader(other.reader.name)
            base, tokens = (0, PROMPT + tokens) if text is None else (base, tokens)
        elif kind == "advance":
            tokens = chain[:kept] + tokens
        elif kind == "replace":
            base = max(1, base - kept)
        elif kind == "repeat":
            asker.commit(bench, row, base, tokens, sampling)
        elif kind == "lose":
            text += tokens
            base = len(text)
        elif kind == "evict":
            bench.forget(asker.reader, row)
        elif kind == "reconnect":
            bench.texts.disconnect(asker.reader)
            asker.reader = bench.reader(asker.reader.name)
        drafted = asker.commit(bench, row, base, tokens, sampling)
        assert drafted == [
            node.token for node in fresh_chain(hosted, asker.texts[row], sampling, 4)
        ]
    hosted.host.lm.kv.check_integrity()


def test_rows_asked_for_together_are_drafted_as_if_alone(hosted: HostedDrafter) -> None:
    """One call for rows of two askers, lying apart in the cache, of several lengths and ways to
    draw."""
    bench = Bench(hosted)
    readers = [bench.reader("a"), bench.reader("b")]
    num_sent = {}
    for number, (kind, sampling) in enumerate(SAMPLINGS.items()):
        for reader in readers:
            text = [*PROMPT[: 3 + number % 3], number, ord(reader.name)]
            num_sent[reader.name, number] = text, kind
            assert (
                bench.tell(
                    reader,
                    row=number,
                    tokens=text,
                    sampling=sampling,
                    num_draft_tokens=1 + number % 5,
                )
                is None
            )
    bench.worker.turn()
    some = [(reader, number) for reader in readers for number in range(0, len(SAMPLINGS), 2)]
    for reader, number in some:
        reader.replies.clear()
        base = len(num_sent[reader.name, number][0])
        assert (
            bench.tell(reader, row=number, base_length=base, tokens=[9], num_draft_tokens=3) is None
        )
    bench.worker.turn()
    for reader, number in some:
        text, kind = num_sent[reader.name, number]
        (reply,) = [reply for reply in reader.replies if reply.row == number]
        assert chain_of(reply) == [
            node.token for node in fresh_chain(hosted, [*text, 9], SAMPLINGS[kind], 3)
        ]


def test_what_was_drafted_and_kept_is_not_read_again(
    hosted: HostedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After four tokens were kept, the next draft begins after them: its first pass feeds two
    tokens, not six."""
    bench = Bench(hosted)
    reader = bench.reader("a")
    reply = bench.ask(reader, 1, tokens=PROMPT, sampling=messages.Sampling(), num_draft_tokens=4)
    lm, widths = hosted.host.lm, []
    forward = lm.forward

    def noted(tokens: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        widths.append(tokens.shape[1])
        return forward(tokens, *rest, **named)

    monkeypatch.setattr(lm, "forward", noted)
    bench.ask(reader, 1, base_length=len(PROMPT), tokens=[*chain_of(reply), 77], num_draft_tokens=4)
    assert widths == [2, 1, 1, 1]
    widths.clear()
    # all four drafted tokens were wrong
    bench.ask(reader, 1, base_length=len(PROMPT) + 5, tokens=[88], num_draft_tokens=4)
    assert widths == [1, 1, 1, 1]


def test_a_long_prompt_does_not_hold_up_its_neighbours(hosted: HostedDrafter) -> None:
    """A long prompt is read a chunk at a time. A short text beside it gets its drafts meanwhile,
    and in the end both have the same draft.
    """
    bench = Bench(hosted)
    reader = bench.reader("a")
    long = [(7 * index) % VOCAB for index in range(1500)]
    assert (
        bench.tell(reader, row=1, tokens=long, sampling=messages.Sampling(), num_draft_tokens=3)
        is None
    )
    assert (
        bench.tell(reader, row=2, tokens=PROMPT, sampling=messages.Sampling(), num_draft_tokens=3)
        is None
    )
    bench.turns(reader, 2)
    assert not reader.replies
    reply = bench.turns(reader, 1)
    assert chain_of(reply) == [
        node.token for node in fresh_chain(hosted, long, messages.Sampling(), 3)
    ]


@pytest.mark.slow
def test_the_cache_ends_where_the_text_does(hosted: HostedDrafter, tmp_path: Path) -> None:
    """Near the end of the context fewer tokens are drafted, at it none, and beyond it the row is
    refused."""
    small = hosted_model(save_draft(tmp_path, max_position_embeddings=16))
    bench = Bench(small)
    reader = bench.reader("a")
    reply = bench.ask(reader, 1, tokens=[1] * 13, sampling=messages.Sampling(), num_draft_tokens=6)
    assert len(reply.nodes) == 3
    reply = bench.ask(reader, 1, base_length=13, tokens=[1] * 3, num_draft_tokens=6)
    assert not reply.nodes
    refused = bench.tell(reader, row=1, base_length=16, tokens=[1], num_draft_tokens=6)
    assert refused is not None
    assert refused.trouble == messages.TROUBLE_REFUSED
    assert "room for 16" in refused.reason
