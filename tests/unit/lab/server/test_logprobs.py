"""Log-probabilities in every shape that servers write, in none, and the gap between two tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.lab.server.logprobs import TokenLogprob, gap_at, logprobs_of

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["content", "tokens", "token_logprobs", "top_logprobs", "token", "logprob", "bytes"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


def test_both_shapes_say_the_same() -> None:
    completion = {
        "tokens": ["a", " é"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, None],
        "text_offset": [0, 1],
    }
    chat = {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "b", "logprob": -1.5, "bytes": None},
                ],
            },
            {"token": "?", "logprob": -1.0, "bytes": [32, 195, 169], "top_logprobs": []},
        ]
    }
    expected = [
        TokenLogprob(b"a", -0.5, {b"a": -0.5, b"b": -1.5}),
        TokenLogprob(" é".encode(), -1.0),
    ]
    assert logprobs_of(completion) == logprobs_of(chat) == expected


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"content": None},
        {"content": [1]},
        {"tokens": ["a"], "token_logprobs": ["x"], "top_logprobs": None},
        {"tokens": ["a"], "token_logprobs": [float("nan")], "top_logprobs": None},
        {"tokens": ["a"], "token_logprobs": [3.0], "top_logprobs": None},
        {"content": [{"token": "a", "logprob": 0, "bytes": [999], "top_logprobs": []}]},
    ],
)
def test_what_is_in_no_shape_is_not_given(value: Any) -> None:
    assert logprobs_of(value) == []


@given(JSON)
def test_nothing_breaks_it(value: Any) -> None:
    assert all(isinstance(token.text, bytes) for token in logprobs_of(value))


TOKENS = [
    TokenLogprob(b"He", -0.1, {b"He": -0.1}),
    TokenLogprob(b" is", -0.2, {b" is": -0.2, b" w": -0.3, b" was": -0.7, b"?": -5.0}),
]


@pytest.mark.parametrize(
    ("text", "other", "position", "expected"),
    [
        ("He is", "He was", 3, (0.5, False)),  # the longest of the tokens that fit
        ("He is", "He will", 3, (0.1, False)),
        ("He is", "He.", 2, (4.8, True)),  # not listed: less likely than all that are
        ("He is", "He", 2, None),  # the other text ends there
        ("He", "He is", 2, None),
        ("It is", "It was", 3, None),  # the tokens are of another text
        ("He is", "Ho is", 1, None),  # none but the token itself is listed
        ("He is it", "He is me", 6, None),  # the tokens end before
    ],
)
def test_gap(text: str, other: str, position: int, expected: tuple[float, bool] | None) -> None:
    gap = gap_at(TOKENS, text, other, position)
    assert (gap if gap is None else (pytest.approx(gap[0]), gap[1])) == expected
