"""Files of any form and in any state: what is usable is found, what is not is named by its line, and nothing ever crashes."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError, OutriderError
from outrider.lab.workload.files import RequestFile, container_of, read_array, read_blocks, read_documents, read_lines
from outrider.lab.workload.types import BadLine, FileEntry, WorkloadRequest

MANY = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def read(path: Path, **options: Any) -> tuple[list[WorkloadRequest], list[BadLine]]:
    found = list(RequestFile(path, path.name, **options).requests())
    return [one for one in found if isinstance(one, WorkloadRequest)], [one for one in found if isinstance(one, BadLine)]


def saved(folder: Path, content: bytes | str, name: str = "prompts") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def prompts(path: Path) -> list[str | None]:
    return [request.prompt for request in read(path)[0]]


# ---------------------------------------------------------------- lines


@MANY
@given(
    lines=st.lists(
        st.sampled_from(["good", "blank", '{"prompt": 1', "[]", '{"prompt": ""}', '{"nothing": 1}', "nonsense"])
    )
)
def test_bad_lines_have_their_own_numbers(tmp_path: Path, lines: list[str]) -> None:
    """Catches numbers that count only requests, or that forget blank lines; and a bad line that takes its neighbour along."""
    texts = [
        json.dumps({"prompt": f"p{n}"}) if kind == "good" else "" if kind == "blank" else kind
        for n, kind in enumerate(lines, 1)
    ]
    bad = [n for n, kind in enumerate(lines, 1) if kind not in ("good", "blank")]
    good = [n for n, kind in enumerate(lines, 1) if kind == "good"]
    found = list(read_lines(io.StringIO("\n".join(texts))))
    source = RequestFile(saved(tmp_path, "\n".join(texts)), "x")
    read_back = [one for entry in found for one in source._read(entry)]
    assert [one.number for one in read_back if isinstance(one, BadLine)] == bad
    assert [one.prompt for one in read_back if isinstance(one, WorkloadRequest)] == [f"p{n}" for n in good]
    assert [one.id for one in read_back if isinstance(one, WorkloadRequest)] == [f"x:{n}" for n in good]


def test_first_line_may_be_the_bad_one(tmp_path: Path) -> None:
    """The file would be taken for plain text."""
    path = saved(tmp_path, 'oops\n{"prompt": "a"}\n{"prompt": "b"}\n')
    requests, bad = read(path)
    assert [r.prompt for r in requests] == ["a", "b"]
    assert [line.number for line in bad] == [1]
    assert "not JSON" in bad[0].reason


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("last", [True, False], ids=["newline at the end", "none"])
def test_marks_and_line_ends(tmp_path: Path, ending: str, mark: str, last: bool) -> None:
    text = mark + ending.join(['{"prompt": "ä\\r\\n"}', "", '{"prompt": "b"}']) + (ending if last else "")
    requests, bad = read(saved(tmp_path, text))
    assert [(r.prompt, r.id) for r in requests] == [("ä\r\n", "prompts:1"), ("b", "prompts:3")]
    assert not bad


def test_other_line_separators_do_not_count(tmp_path: Path) -> None:
    """str.splitlines would split here and put every number behind it out by one."""
    text = '{"prompt": "a\u2028b\u0085c\x7f"}\n{"prompt": 3}\n'
    requests, bad = read(saved(tmp_path, text))
    assert requests[0].prompt == "a\u2028b\u0085c\x7f"
    assert [line.number for line in bad] == [2]


@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
def test_utf16_as_windows_writes_it(tmp_path: Path, order: str) -> None:
    data = '\ufeff{"prompt": "Größe"}\r\n{"prompt": "b"}\r\n'.encode(order)
    assert prompts(saved(tmp_path, data)) == ["Größe", "b"]
    with pytest.raises(ConfigError, match="UTF-16 but is damaged"):
        read(saved(tmp_path, data[:-1]))


def test_bytes_that_are_not_utf8_spoil_their_line_only(tmp_path: Path) -> None:
    data = b'{"prompt": "gut"}\n{"prompt": "gr\xfc\xdf"}\n{"prompt": "ok", "junk": "\xff"}\n'
    requests, bad = read(saved(tmp_path, data))
    assert [r.prompt for r in requests] == ["gut", "ok"]
    assert bad == [BadLine(2, "the byte 0xfc is not UTF-8; convert the file, e.g. with iconv")]


def test_half_characters_are_refused_in_every_field(tmp_path: Path) -> None:
    """They pass json.loads and break tokenizers, terminals and result files later."""
    entries = [
        {"prompt": "a\ud800"}, {"prompt": "a", "id": "\udc00"}, {"prompt": "a", "reference": "\ud800"},
        {"messages": [{"role": "user", "content": "x \ud83d"}]}, {"prompt": "a", "answer": "\ud800"}, {"prompt": "😀"},
    ]  # fmt: skip
    requests, bad = read(saved(tmp_path, "\n".join(map(json.dumps, entries))))
    assert [line.number for line in bad] == [1, 2, 3, 4, 5]
    assert all("half of a character" in line.reason for line in bad)
    assert [r.prompt for r in requests] == ["😀"]


def test_nul_bytes_are_named(tmp_path: Path) -> None:
    requests, bad = read(saved(tmp_path, b'{"prompt": "a\0b"}\n{"prompt": "c"}\n'))
    assert [r.prompt for r in requests] == ["c"]
    assert "NUL" in bad[0].reason
    with_text, bad = read(saved(tmp_path, b"one\n\ntwo\0two\n\nthree"))
    assert [r.prompt for r in with_text] == ["one", "three"]
    assert [(line.number, "NUL" in line.reason) for line in bad] == [(3, True)]


def test_a_line_of_20_mb(tmp_path: Path) -> None:
    long = "word " * 4_000_000
    requests, bad = read(saved(tmp_path, json.dumps({"prompt": long}) + '\n{"prompt": 3}\n'))
    assert requests[0].prompt == long
    assert [line.number for line in bad] == [2]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"prompt": ' + "[" * 100_000, '{"prompt": ' + "9" * 5000 + "}", '[{"a": ' + "[" * 99_999]
)
def test_what_exhausts_the_parser(tmp_path: Path, text: str) -> None:
    """RecursionError and Python's limit on digits are no JSONDecodeErrors."""
    requests, bad = read(saved(tmp_path, text))
    assert not requests
    assert len(bad) == 1


# ---------------------------------------------------------------- arrays and documents


def stepwise(reader: Callable[[io.StringIO, int], Iterator[FileEntry | BadLine]], text: str, window: int) -> list[Any]:
    return [one if isinstance(one, BadLine) else (one.line, one.value) for one in reader(io.StringIO(text), window)]


@MANY
@given(values=st.lists(VALUES, max_size=6), indent=st.sampled_from([None, 0, 2]), window=st.integers(1, 40))
@example(values=[1.5, -20, 3e22, True, "a"], indent=None, window=1)
def test_arrays_read_in_pieces_equal_arrays_read_at_once(values: list[Any], indent: int | None, window: int) -> None:
    """Catches values torn at the edge of the window, numbers above all, and lines counted twice."""
    text = json.dumps(values, indent=indent)
    found = stepwise(read_array, text, window)
    assert [value for _, value in found] == values
    if indent is not None:
        expected, line = [], 2
        for value in values:
            expected.append(line)
            line += json.dumps(value, indent=indent).count("\n") + 1
        assert [number for number, _ in found] == expected


@MANY
@given(values=st.lists(VALUES, max_size=6), indent=st.sampled_from([None, 2]), window=st.integers(1, 40))
def test_documents_one_after_another(values: list[Any], indent: int | None, window: int) -> None:
    """What `jq .` writes."""
    text = "\n".join(json.dumps(value, indent=indent) for value in values)
    assert [value for _, value in stepwise(read_documents, text, window)] == values


@pytest.mark.parametrize("window", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "good", "line", "reason"),
    [
        ('[{"prompt": "a"},\n{"prompt": "b"', 1, 2, "Expecting ',' delimiter"),
        ('[{"prompt": "a"}\n,\n\n{"prompt" "b"}]', 1, 4, "Expecting ':' delimiter"),
        ('[\n{"prompt": "a"}\n{"prompt": "b"}]', 1, 3, "expected ','"),
        ('[{"prompt": "a"}]\n\n{"prompt": "b"}', 1, 3, "something follows"),
        ('[{"prompt": "a"},\n]', 1, 2, "Expecting value"),
        ('[{"prompt": "a"}', 1, 1, "found the end of the file"),
        ("[", 0, 1, "Expecting value"),
    ],
)
def test_a_broken_array_says_where_and_that_the_rest_is_lost(
    text: str, good: int, line: int, reason: str, window: int
) -> None:
    *found, last = stepwise(read_array, text, window)
    assert len(found) == good
    assert isinstance(last, BadLine)
    assert last.number == line
    assert reason in last.reason
    assert "nothing behind this point could be read" in last.reason


def test_entries_of_an_array_are_named_by_position_and_line(tmp_path: Path) -> None:
    requests, bad = read(saved(tmp_path, '[{"prompt": "a"}, {"prompt": 5},\n "text", 7, {"prompt": "z"}]'))
    assert [(r.prompt, r.id) for r in requests] == [("a", "prompts#1"), ("text", "prompts#3"), ("z", "prompts#5")]
    assert [(line.number, line.reason.split(":")[0]) for line in bad] == [(1, "entry 2"), (2, "entry 4")]


def test_reading_stops_where_the_reader_stops(tmp_path: Path) -> None:
    """A limit on a file of 600 MB must not read 600 MB: here the second half is not even JSON."""
    for text in ('[{"prompt": "a"}, ' + '{"prompt": "b"}, ' * 200_000 + "###", '{"prompt": "a"}\n' * 200_000 + "\xff"):
        path = saved(tmp_path, text)
        with path.open("rb", buffering=0) as raw:
            entries = RequestFile(path, "x")._entries(raw)
            next(iter(entries))
            assert raw.tell() < path.stat().st_size / 2


# ---------------------------------------------------------------- text


def test_plain_text_is_a_prompt_per_block(tmp_path: Path) -> None:
    source = RequestFile(saved(tmp_path, "\n\nfirst\r\n  second line\n \t\nthird\n\n\n"), "t")
    found = list(source.requests())
    assert [(r.prompt, r.id) for r in found if isinstance(r, WorkloadRequest)] == [
        ("first\n  second line", "t:3"),
        ("third", "t:6"),
    ]
    assert source.is_text


@pytest.mark.parametrize(
    ("start", "reader"),
    [
        ('{"prompt": "a"}\n', read_lines),
        ('{"prompt": "unfinished', read_lines),
        ("[INST] hello [/INST]", read_blocks),
        ("[1] Paris is", read_blocks),
        ("Dear\n{\n}\nall", read_blocks),
        ("", read_blocks),
        ('[{"a"', read_array),
        ("\n [\n", read_array),
        ("[]", read_array),
        ('["a"]', read_array),
        ('{\n  "prompt"', read_documents),
        ("{", read_documents),
    ],
)
def test_files_are_recognised_by_their_beginning(start: str, reader: object) -> None:
    assert container_of(start) is reader


# ---------------------------------------------------------------- the file itself


def test_gzip_is_unpacked_and_damage_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"prompt": "a"}\n' * 50)
    assert prompts(saved(tmp_path, packed)) == ["a"] * 50
    for damaged in (packed[:-9], packed[:10] + b"\xff" * 30, packed[:-8] + b"\0" * 8):
        with pytest.raises(ConfigError, match="damaged gzip file"):
            read(saved(tmp_path, damaged))


@pytest.mark.parametrize(
    ("start", "what"), [(b"PAR1\x15", "Parquet"), (b"PK\x03\x04", "zip"), (b"\x28\xb5\x2f\xfd\0", "zstd")]
)
def test_other_packings_are_refused_with_what_to_do(tmp_path: Path, start: bytes, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read(saved(tmp_path, start + b"x" * 100))


@pytest.mark.parametrize("content", [b"", b"\n\n \n", b"\xef\xbb\xbf", b"[]", b"[ ]\n"])
def test_empty_files(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read(saved(tmp_path, content))


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "gone")


WORDS = b"null 1e999 NaN \xef\xbb\xbf \xff\xfe \x1f\x8b"
FIELDS = rb'"prompt" "messages" "conversations" "body" "request" "turns" "\ud800" {"prompt":"a"}'
JUNK = st.sampled_from([*WORDS.split(b" "), *FIELDS.split(b" "), *(bytes([mark]) for mark in b'{}[]",:\n\r\0\xff ')])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | st.lists(JUNK, max_size=14).map(b"".join))
def test_no_file_makes_a_traceback(tmp_path: Path, content: bytes) -> None:
    """Whatever the bytes: requests, bad lines inside the file, or an error that a person can read."""
    try:
        requests, bad = read(saved(tmp_path, content))
    except OutriderError:
        return
    num_lines = max(1, content.count(b"\n") + 1)
    assert all(1 <= line.number <= num_lines and line.reason for line in bad)
    assert all(r.id and ((r.prompt is None) != (r.messages is None)) for r in requests)
