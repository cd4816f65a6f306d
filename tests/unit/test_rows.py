"""How tokens enter a text: origins, ends inside a block, log-probabilities, and per-batch state
that follows rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.rows import Row, Rows
from outrider.sampling.distribution import History
from outrider.sampling.params import SamplingParams
from outrider.stops import StopStrings
from outrider.types import Draft, Verdict
from tests.helpers import make_row, word_tokenizer

V = 10
TOKENIZER = word_tokenizer(V)
PENALISED = SamplingParams(presence_penalty=0.5, max_tokens=20)


def rows_of(*rows: Row) -> Rows:
    made = Rows(V, torch.device("cpu"))
    for row in rows:
        made.add(row)
    return made


def append(
    rows: Rows, drafted: list[int], kept: int, extra: int, logits: torch.Tensor | None = None
) -> list[int]:
    """One step of a batch of one."""
    draft = Draft(
        torch.tensor([drafted], dtype=torch.int64).view(1, -1), torch.tensor([len(drafted)])
    )
    path = torch.tensor([[n if n < kept else -1 for n in range(len(drafted))]], dtype=torch.int64)
    verdict = Verdict(
        path, torch.tensor([kept]), torch.tensor([extra]), torch.tensor([kept == len(drafted)])
    )
    return rows.append(
        draft, verdict, torch.zeros(1, len(drafted) + 1, V) if logits is None else logits
    )


def test_origins() -> None:
    """Catches a correction shown as a bonus, or a plain token as either."""
    rows = rows_of(make_row([1], SamplingParams(max_tokens=20)))
    assert [append(rows, [2, 3], 2, 4), append(rows, [2, 3], 1, 4), append(rows, [], 0, 5)] == [
        [3],
        [2],
        [1],
    ]
    assert rows[0].origins == ["accepted", "accepted", "bonus", "accepted", "correction", "plain"]
    assert rows[0].tokens == [1, 2, 3, 4, 2, 4, 5]
    stats = rows[0].stats
    assert (stats.steps, stats.emitted, stats.drafted, stats.tested, stats.accepted) == (
        3,
        6,
        4,
        4,
        3,
    )
    assert stats.accepted_per_position == [2, 1]


def test_greedy_rows_are_ranked_by_a_distribution_however_they_ask_for_it() -> None:
    """top_p 0 is greedy, too: catches candidates that are ranked by a point mass."""
    rows = rows_of(
        *(
            make_row([1], SamplingParams(**options))
            for options in ({}, {"top_p": 0}, {"temperature": 0.5})
        )
    )
    assert rows.soft_sampling.options.tolist() == [[1, 0, 1, 0], [1, 0, 1, 0], [0.5, 0, 1, 0]]


def test_text_that_was_held_back_is_released_once() -> None:
    """Catches text lost, or doubled, where a row is ended from outside while it waits for a stop
    string."""
    row = make_row([1], SamplingParams(max_tokens=20, stop=["w3 w9"]), tokenizer=TOKENIZER)
    for token in (2, 3):
        row.add(token, "plain")
    assert row.text == " w2 "
    assert [row.release(), row.release(), row.text] == ["w3", "", " w2 w3"]
    row.add(9, "plain")
    assert row.text == " w2 w3 w9"


@pytest.mark.parametrize(
    ("params", "expected", "text", "reason"),
    [
        (SamplingParams(stop_token_ids=[3]), [2, 3], "w2", "stop 3"),
        (
            SamplingParams(stop_token_ids=[3], include_stop_str_in_output=True),
            [2, 3],
            "w2 w3",
            "stop 3",
        ),
        (SamplingParams(stop=["w3 w4"]), [2, 3, 4], "w2 ", "stop w3 w4"),
        (
            SamplingParams(stop=["w9", "w3 w"], include_stop_str_in_output=True),
            [2, 3, 4],
            "w2 w3 w",
            "stop w3 w",
        ),
        (SamplingParams(stop=["w3 w4"], stop_token_ids=[4]), [2, 3, 4], "w2 w3", "stop 4"),
        (SamplingParams(stop=["w9"], max_tokens=3), [2, 3, 4], "w2 w3 w4", "length None"),
        (SamplingParams(max_tokens=1), [2], "w2", "length None"),
        (SamplingParams(max_tokens=3, stop_token_ids=[4]), [2, 3, 4], "w2 w3", "stop 4"),
        (SamplingParams(), [2, 3, 4, 5], "w2 w3 w4", "stop None"),
        (SamplingParams(stop_token_ids=[5]), [2, 3, 4, 5], "w2 w3 w4", "stop None"),
    ],
)
def test_ends_inside_a_block(
    params: SamplingParams, expected: list[int], text: str, reason: str
) -> None:
    """Catches overshoot in tokens, text or counters; all four draft tokens and the bonus were kept
    by the verifier. What ended it is no part of its text and is named, unless it was the model's
    own end token, 5."""
    row = make_row([1], params, tokenizer=TOKENIZER, stop_tokens=frozenset({5}))
    row.stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
    rows = rows_of(row)
    assert append(rows, [2, 3, 4, 5], 4, 6) == [len(expected)]
    assert (row.output, row.text.strip(), f"{row.finish_reason} {row.stop_reason}") == (
        expected,
        text.strip(),
        reason,
    )
    assert (row.stats.emitted, row.stats.accepted) == (len(expected), len(expected))
    assert row.stats.tested == len(expected), "tokens behind the end were not decided on"
    assert "".join(row.pieces) == row.text


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [("w4 w5", "w2 w3 "), ("3 w4 w5 w6", "w2 w"), ("w3 w4 w6", None), ("w5", "w2 w3 w4 ")],
)
def test_a_stop_string_across_steps(stop: str, text: str | None, include: bool) -> None:
    """It begins with a correction, or before it, and ends among what the next steps accept: catches
    a watcher that looks at each step alone, and text that was shown although it could still become
    one."""
    params = SamplingParams(max_tokens=20, stop=[stop], include_stop_str_in_output=include)
    row = make_row([1], params, tokenizer=TOKENIZER)
    row.stops = StopStrings([stop], include=include)
    rows = rows_of(row)
    taken = []
    shown = []
    for drafted, kept, extra in (([2, 3], 1, 3), ([], 0, 4), ([5, 6, 7], 3, 8)):
        if row.finish_reason is None:
            taken += append(rows, drafted, kept, extra)
            shown.append(row.text)
    assert all(row.text.startswith(part) for part in shown), "nothing is taken back"
    if text is None:
        assert (row.text + row.release(), row.stop_reason, taken) == (
            " w2 w3 w4 w5 w6 w7 w8",
            None,
            [2, 1, 4],
        )
    else:
        assert (row.text, row.stop_reason) == (f" {text}{stop * include}", stop)
        assert taken == [2, 1, 2 if stop.endswith("w6") else 1]


def test_logprobs_come_from_the_kept_path() -> None:
    """Catches log-probabilities of the wrong column: token i follows node i - 1, not node i."""
    logits = torch.randn(1, 4, V, generator=torch.Generator().manual_seed(0))
    rows = rows_of(make_row([1], SamplingParams(max_tokens=20, logprobs=2)))
    append(rows, [2, 3, 4], 2, 5, logits)
    log_probs = torch.log_softmax(logits[0], dim=-1)
    for column, (token, found) in enumerate(zip([2, 3, 5], rows[0].logprobs, strict=True)):
        assert math.isclose(found[token], log_probs[column, token].item(), rel_tol=1e-5)
        best = log_probs[column].topk(2)
        assert [found[int(t)] for t in best.indices] == pytest.approx(best.values.tolist())
        assert list(found.values()) == sorted(found.values(), reverse=True)


def test_a_refused_row_leaves_nothing_behind() -> None:
    """Catches a row that is half added when its options name unknown ids: every later row would
    have another's state."""
    rows = rows_of(make_row([1], PENALISED))
    with pytest.raises(ConfigError):
        rows.add(make_row([1], SamplingParams(allowed_token_ids=[V])))
    assert (len(rows), rows.rng.num_rows, rows.sampling.num_rows) == (1, 1, 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["join", "join-penalised", "leave", "say"]), st.integers(0, 5)),
        max_size=25,
    )
)
def test_history_follows_rows(story: list[tuple[str, int]]) -> None:
    """Catches penalties of another row's text after a departure, or forgotten text after somebody
    joined."""
    rows = Rows(V, torch.device("cpu"))
    for number, (what, index) in enumerate(story):
        if what.startswith("join"):
            params = PENALISED if what == "join-penalised" else SamplingParams(max_tokens=20)
            rows.add(make_row([number % V, index], params, seed=number))
        elif len(rows) and what == "leave":
            rows.swap_remove(index % len(rows))
        elif len(rows):
            tokens = (torch.arange(len(rows)) + index) % V
            draft = Draft(
                torch.stack([tokens, (tokens + 1) % V], dim=1), torch.full_like(tokens, 2)
            )
            kept = torch.full_like(tokens, index % 3)
            verdict = Verdict(torch.tensor([[0, 1]] * len(rows)), kept, (tokens + 2) % V, kept == 2)
            rows.append(draft, verdict, torch.zeros(len(rows), 3, V))
        assert rows.rng.num_rows == len(rows)
        assert (rows.history is None) == (not any(row.params.needs_history for row in rows))
        if rows.history is not None:
            prompts = [row.tokens[: row.num_prompt] for row in rows]
            outputs = [row.output for row in rows]
            expected = History.start(prompts, outputs, V)
            assert torch.equal(rows.history.prompt_mask, expected.prompt_mask)
            assert torch.equal(rows.history.output_counts, expected.output_counts)
