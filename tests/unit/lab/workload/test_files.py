"""Files in any state: what is usable is found, what is not is named by its line, and nothing ever
crashes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError, OutriderError
from outrider.lab.workload.load import load_workload
from outrider.lab.workload.types import BadLine, Workload, WorkloadRequest


def read(folder: Path, content: bytes | str, **options: Any) -> Workload:
    path = folder / "prompts"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_workload(str(path), on_bad="skip", **options)


def prompts(workload: Workload) -> list[str | None]:
    return [request.prompt for request in workload.requests]


KINDS = ["good", "blank", '{"prompt": 1', "[]", '{"prompt": ""}', '{"nothing": 1}', "nonsense"]


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=st.lists(st.sampled_from(KINDS)))
def test_bad_lines_have_their_own_numbers(tmp_path: Path, lines: list[str]) -> None:
    """Catches numbers that count only requests, or that forget blank lines; and a bad line that
    takes its neighbour along."""
    lines = ['{"prompt": "p0"}', *lines]
    texts = [
        json.dumps({"prompt": f"p{n}"}) if kind == "good" else "" if kind == "blank" else kind
        for n, kind in enumerate(lines)
    ]
    workload = read(tmp_path, "\n".join(texts))
    good = [0, *(n for n, kind in enumerate(lines) if kind == "good")]
    assert [one.number for one in workload.skipped] == [
        n for n, kind in enumerate(lines, 1) if n > 1 and kind not in ("good", "blank")
    ]
    assert prompts(workload) == [f"p{n}" for n in good]
    assert [one.id for one in workload.requests] == [f"prompts:{n + 1}" for n in good]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_marks_and_line_ends(tmp_path: Path, ending: str, mark: str) -> None:
    """str.splitlines would split at other separators, and put every number after it out by one."""
    text = mark + ending.join(['{"prompt": "a\u2028b\u0085c\\r\\n"}', "", '{"prompt": "b"}'])
    workload = read(tmp_path, text)
    assert [(r.prompt, r.id) for r in workload.requests] == [
        ("a\u2028b\u0085c\r\n", "prompts:1"),
        ("b", "prompts:3"),
    ]


def test_bytes_that_are_not_utf8_spoil_their_line_only(tmp_path: Path) -> None:
    """Half characters pass json.loads and break tokenizers, terminals and result files later."""
    data = b'{"prompt": "gut"}\n{"prompt": "gr\xfc\xdf"}\n{"prompt": "ok", "junk": "\xff"}\n{"prompt": "a", "id": "\\udc00"}\n'
    workload = read(tmp_path, data)
    assert prompts(workload) == ["gut", "ok"]
    assert [line.number for line in workload.skipped] == [2, 4]
    assert "UTF-8" in workload.skipped[0].reason


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"prompt": ' + "[" * 100_000, '{"prompt": ' + "9" * 5000 + "}"]
)
def test_what_exhausts_the_parser(tmp_path: Path, text: str) -> None:
    """RecursionError and Python's limit on digits are no JSONDecodeErrors."""
    with pytest.raises(ConfigError):
        read(tmp_path, text)


def test_entries_of_a_list_are_named_by_position(tmp_path: Path) -> None:
    workload = read(tmp_path, '\n[{"prompt": "a"}, {"prompt": 5},\n 7, {"prompt": "z"}]')
    assert [(r.prompt, r.id) for r in workload.requests] == [("a", "prompts#1"), ("z", "prompts#4")]
    assert [line.number for line in workload.skipped] == [2, 3]


def test_reading_stops_where_the_limit_is(tmp_path: Path) -> None:
    workload = read(tmp_path, '{"prompt": "a"}\n' * 2 + "###", limit=2)
    assert prompts(workload) == ["a", "a"]
    assert workload.skipped == ()


def test_gzip_is_unpacked_and_damage_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"prompt": "a"}\n' * 50)
    assert prompts(read(tmp_path, packed)) == ["a"] * 50
    for damaged in (packed[:-9], packed[:10] + b"\xff" * 30, packed[:-8] + b"\0" * 8):
        with pytest.raises(ConfigError, match="damaged gzip file"):
            read(tmp_path, damaged)


@pytest.mark.parametrize("content", [b"", b"\n\n \n", b"\xef\xbb\xbf", b"[]", b"[ ]\n"])
def test_empty_files(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read(tmp_path, content)


@pytest.mark.parametrize("content", ["Tell me a joke.\n\nAnd another.", "[INST] hello [/INST]"])
def test_what_is_neither_lines_nor_a_list_says_what_a_request_is(
    tmp_path: Path, content: bytes | str
) -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        ("16-3-4=9\n9*2=18\n#### 18", "18", True),
        ("#### $1,234.00", "1234", True),
        ("#### -$5", "-5", True),
        ("#### 18 eggs", "18", True),
        ("#### 74\nQuestion: next?\nAnswer: #### 75", "74", True),
        ("She makes 18.", "18", True),
        ("She makes **18** dollars for 3 eggs.", "18", False),
        ("no number", "18", False),
        ("#### 18", "Canberra", None),
        ("#### 18", None, None),
    ],
)
def test_right_answers(text: str, reference: str | None, right: bool | None) -> None:
    assert WorkloadRequest("r", "p", reference=reference).is_right(text) is right


WORDS = b"null 1e999 NaN \xef\xbb\xbf \xff\xfe \x1f\x8b"
FIELDS = rb'"prompt" "messages" "conversations" "body" "request" "turns" "\ud800" {"prompt":"a"}'
JUNK = st.sampled_from(
    [*WORDS.split(b" "), *FIELDS.split(b" "), *(bytes([mark]) for mark in b'{}[]",:\n\r\0\xff ')]
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=60) | st.lists(JUNK, max_size=14).map(b"".join))
def test_no_file_makes_a_traceback(tmp_path: Path, content: bytes) -> None:
    """Whatever the bytes: requests, bad lines inside the file, or an error that a person can read."""
    try:
        workload = read(tmp_path, content)
    except OutriderError:
        return
    assert all(isinstance(line, BadLine) and line.reason for line in workload.skipped)
    assert all(r.id and ((r.prompt is None) != (r.messages is None)) for r in workload.requests)
