"""Streams of every dialect, whole and broken, and what they say of speculation."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.lab.server.server_result import positions
from outrider.lab.server.stream import BadStreamError, Stream, error_text, mended, one_line
from outrider.lab.server.types import SpeculationCounts


def played(*events: Any) -> Stream:
    """One event a second."""
    stream = Stream()
    for index, event in enumerate(events):
        stream.feed(event if isinstance(event, str) else json.dumps(event), float(index + 1))
    return stream


def text(content: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": reason}]}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 4, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}},
}


def test_completions() -> None:
    """Time to the first text, every chunk's arrival, and the end of the text: usage and end mark come later and do not count."""
    stream = played(text("a"), text("b c"), text("", "stop"), USAGE, "[DONE]")
    assert "".join(stream.texts) == "ab c"
    assert stream.chunks_s == [1.0, 2.0]
    assert (stream.seconds, stream.finish_reason, stream.ended) == (3.0, "stop", True)
    assert (stream.num_tokens, stream.num_prompt_tokens, stream.num_cached_tokens) == (9, 4, 3)


def test_chat_with_reasoning() -> None:
    """The first thing a model that thinks says is its thinking: that is the first token."""
    stream = played(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm", content=None),
        delta(reasoning="so"),
        delta(reasoning=" it", reasoning_content=" it"),
        delta(content="42"),
    )
    assert "".join(stream.texts) == "hmso it42", "two names of one text"
    assert stream.chunks_s == [2.0, 3.0, 4.0, 5.0]
    assert not stream.is_whole


def test_usage_may_ride_on_the_last_chunk_or_on_all() -> None:
    """llama.cpp puts it beside the finish reason, vLLM on request on every chunk: the latest counts."""
    one = text("a") | {"usage": {"completion_tokens": 1}}
    two = text("b", "length") | {"usage": {"completion_tokens": 2}}
    assert played(one, two).num_tokens == 2


def test_timings_count_where_usage_does_not() -> None:
    assert played(text("a", "stop") | {"timings": {"predicted_n": 5, "cache_n": 2}}).num_tokens == 5
    assert played(text("a", "stop")).num_tokens is None
    assert played(text("a", "stop") | {"usage": None}).num_tokens is None


def test_halves_of_characters_are_joined_or_replaced() -> None:
    """Servers that cut a text between two escapes; a lone half would make the result unwritable."""
    parts = json.loads('["\\ud83d", "\\ude00", " \\ud83d!"]')
    assert mended("".join(parts)) == "\U0001f600 \ufffd!"


def test_heartbeats_are_nothing() -> None:
    assert played("", " ").chunks_s == []


@pytest.mark.parametrize(
    "event", ["{", "[1]", '"text"', '{"choices": {"a": 1}}', '{"choices": [1]}', "nan", "[" * 100_000]
)
def test_what_is_no_chunk(event: str) -> None:
    with pytest.raises(BadStreamError, match="event of the stream") as error:
        played(event)
    assert error.value.kind == "malformed"
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("event", [{"error": {"message": "EngineCore died"}}, {"error": "EngineCore died"}])
def test_an_error_in_the_stream_is_the_servers_own(event: dict[str, Any]) -> None:
    with pytest.raises(BadStreamError, match="EngineCore died") as error:
        played(text("a"), event)
    assert error.value.kind == "aborted"


@pytest.mark.parametrize(
    ("code", "status"), [(400, 400), (503, 503), (200, None), (0, None), ("rate_limit", None), (True, None), (None, None)]
)
def test_an_error_may_name_its_status(code: Any, status: int | None) -> None:
    """OpenAI's own codes are words, and a number need not be one of HTTP."""
    with pytest.raises(BadStreamError) as error:
        played({"error": {"message": "no", "code": code}})
    assert error.value.status == status


def test_a_request_that_was_given_up_is_no_answer() -> None:
    with pytest.raises(BadStreamError, match="abort"):
        played(text("a"), text("", "abort"))


NAMES = (
    *(
        "choices",
        "delta",
        "text",
        "content",
        "usage",
        "metrics",
        "timings",
        "error",
        "meta_info",
        "sglext",
        "finish_reason",
    ),
    *(
        "speculative_decoding",
        "speculative_decoding_stats",
        "acceptance_histogram",
        "spec_verify_ct",
        "completion_tokens",
    ),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES), inner),
)


@given(JSON)
def test_no_json_breaks_the_reader(event: Any) -> None:
    """Whatever a server sends ends in a chunk or a BadStreamError."""
    with contextlib.suppress(BadStreamError):
        played(json.dumps(event))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too long", "code": 400}}, "too long"),
        ({"object": "error", "message": "too\n long"}, "too long"),
        ({"detail": [{"loc": ["body"], "msg": "Extra inputs"}]}, "Extra inputs"),
        ({"error": {"message": ""}}, '{"message": ""}'),
        ({"strange": 1}, '{"strange": 1}'),
        ([], "[]"),
        (None, "null"),
    ],
)
def test_error_bodies(body: Any, message: str) -> None:
    assert error_text(body) == message


def test_long_errors_are_cut() -> None:
    assert one_line("x" * 1000).endswith("…")
    assert len(one_line("x" * 1000)) == 300


def test_sums_do_not_invent() -> None:
    """A count that one side lacks must not become the other side's."""
    whole = SpeculationCounts(
        num_steps=2, num_draft_tokens=6, num_accepted_tokens=4, num_full_steps=0, accepted_per_position=[2, 2, 0]
    )
    both = whole + SpeculationCounts(num_steps=1, num_draft_tokens=3, num_accepted_tokens=1, accepted_per_position=[1])
    assert both == SpeculationCounts(num_steps=3, num_draft_tokens=9, num_accepted_tokens=5, accepted_per_position=[3, 2, 0])
    assert (whole + SpeculationCounts(num_draft_tokens=3, num_accepted_tokens=1)).accepted_per_position == []
    nothing = SpeculationCounts(num_steps=0, num_draft_tokens=0, num_accepted_tokens=0, num_full_steps=0)
    assert whole + nothing == whole
    assert nothing.tau is None
    assert nothing.draft_utilisation is None
    assert positions(nothing) == []
