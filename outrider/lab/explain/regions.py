"""The kind of text of each token, and the part of the answer it stands in: by rules on characters,
no model.

docs/explain.md, "Kinds of text", has the rules.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from outrider.text import Brackets

KINDS = ("tool call", "code", "number", "name", "word", "punctuation", "whitespace")
SECTIONS = ("thinking", "answer", "text")

_TOOL = re.compile(
    r"<tool_call>.*?(?:</tool_call>|\Z)|<function=.*?(?:</function>|\Z)|(?:<\|python_tag\|>|\[TOOL_CALLS\]).*?(?=\n\n|\Z)",
    re.DOTALL,
)
_JSON_START = re.compile(r"[{\[]\s*(?:\{\s*)?\"[^\"\n]*\"\s*:")
_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_QUOTED = re.compile(r"`[^`\n]+`")
_CODE_STARTS = re.compile(
    r"(?:async\s+)?def\s+\w+\s*\(|class\s+\w+\s*[(:{]|import\s+[\w.*{]+|from\s+[\w.]+\s+import\b|@\w[\w.]*$|>>>\s|#include\b|//|"
    r"(?:assert|raise|yield|del|const|let|var|public|private|static|func|fn|struct|impl|package)\s+\w|return(?:\s|;|$)"
)
_BLOCK_STARTS = re.compile(r"(?:if|elif|while|for|with|except|try|else|finally)\b.*:$")
_CODE_ENDS = re.compile(r"[=()\[\]].*;$|[)\w]\s*\{$|^[)\]}]+[,;]?$")
# code only where the line is indented
_STATEMENT = re.compile(r"[\w.\[\]]+\s*(?:[-+*/|&%]|//|\*\*)?=[^=]|[\w.]+\(")
_NUMBER = re.compile(r"[$€£¥]?\d(?:[\d]|[.,:/](?=\d))*%?")
_WORD = re.compile(r"[^\W\d_](?:[^\W_]|['’-](?=[^\W\d_]))*")
_SENTENCE_END = re.compile(r"(?:^|[.!?:\n•*#>\"“”(\-])[\s\"“”'(*_#>-]*$")
_MARK = re.compile(
    r"####|(?:^|(?<=[.!?]\s))[ \t*#]*(?:the\s+)?(?:final\s+)?answer(?:\s+is\b|\s*:)|(?:^|(?<=[.!?]\s))[ \t*#]*final answer\b",
    re.IGNORECASE | re.MULTILINE,
)
_THINK = re.compile(r"<think>|</think>")


def token_kinds(prompt_end: str, pieces: Sequence[str]) -> list[str]:
    """The kind of each token from the text each one added (empty: the character comes with a later
    one). `prompt_end`: some text before them, which decides what begins a sentence."""
    labels = character_kinds(prompt_end + "".join(pieces))
    starts = [len(prompt_end) + at for at in accumulate(map(len, pieces), initial=0)]
    kinds: list[str] = []
    for start, piece in zip(starts, pieces, strict=False):
        visible = next((at for at, char in enumerate(piece) if not char.isspace()), None)
        at = start + (visible or 0)
        kinds.append(labels[at] if at < len(labels) else "whitespace")
        if not piece:  # part of a character that a later token completes
            kinds[-1] = labels[start] if start < len(labels) else "punctuation"
    return kinds


def token_sections(prompt_end: str, pieces: Sequence[str]) -> list[str]:
    """The section of each token; an opened <think> may stand in `prompt_end`. Marks belong to the
    section they open."""
    text = prompt_end + "".join(pieces)
    cuts = section_starts(text, len(prompt_end))
    boundaries = [at for at, _ in cuts]
    starts = [len(prompt_end) + at for at in accumulate(map(len, pieces), initial=0)]
    ends = [start + max(0, len(piece) - 1) for start, piece in zip(starts, pieces, strict=False)]
    return [cuts[bisect_right(boundaries, end) - 1][1] for end in ends]


def character_kinds(text: str) -> list[str]:
    """One kind per character."""
    labels = ["whitespace" if char.isspace() else "punctuation" for char in text]
    for word in _WORD.finditer(text):
        _fill(labels, word.span(), "name" if _is_name(word[0], text, word.start()) else "word")
    for word in _NUMBER.finditer(text):
        if word.start() == 0 or not (
            text[word.start() - 1].isalnum() and text[word.start()].isdigit()
        ):
            _fill(labels, word.span(), "number")
    quoted = (word.span() for pattern in (_QUOTED, _FENCE) for word in pattern.finditer(text))
    for span in (*_code_lines(text), *quoted):
        _fill(labels, span, "code")
    for span in (*(word.span() for word in _TOOL.finditer(text)), *_json_spans(text)):
        _fill(labels, span, "tool call")
    return labels


def section_starts(text: str, answer_from: int = 0) -> list[tuple[int, str]]:
    """(first character, section), the first of them at 0. Words that mark an answer count from
    `answer_from` on: "Answer:" at the end of a prompt asks for one."""
    marks = list(_THINK.finditer(text))
    if marks:
        first = "thinking" if marks[0][0] == "</think>" else "text"
        return [
            (0, first),
            *((mark.start(), "thinking" if mark[0] == "<think>" else "answer") for mark in marks),
        ]
    answers = [mark.start() for mark in _MARK.finditer(text) if mark.start() >= answer_from]
    return [(0, "thinking"), (answers[-1], "answer")] if answers else [(0, "text")]


def _fill(labels: list[str], span: tuple[int, int], kind: str) -> None:
    labels[span[0] : span[1]] = [kind] * (span[1] - span[0])


def _code_lines(text: str) -> Iterator[tuple[int, int]]:
    """Lines that read like a program. A lone statement counts where it is indented: "total = 5 * 3"
    may be arithmetic."""
    start = 0
    for line in text.splitlines(keepends=True):
        words = line.strip()
        indented = line.startswith(("  ", "\t")) and _STATEMENT.match(words)
        begins = _CODE_STARTS.match(words) and not words.endswith((".", "?", "!"))
        if words and (indented or begins or _BLOCK_STARTS.match(words) or _CODE_ENDS.search(words)):
            yield start, start + len(line.rstrip("\r\n"))
        start += len(line)


def _is_name(word: str, text: str, start: int) -> bool:
    if word in ("I", "I'm", "I'll", "I've", "I'd"):
        return False
    if any(char.isupper() for char in word[1:]):
        return True
    return word[0].isupper() and not _SENTENCE_END.search(text[max(0, start - 40) : start])


def _json_spans(text: str) -> Iterator[tuple[int, int]]:
    """Objects and arrays whose first key is quoted, up to the bracket that closes them, or the end
    of the text."""
    end = 0
    for opening in _JSON_START.finditer(text):
        start = opening.start()
        if start >= end:
            brackets = Brackets()
            end = next(
                (at + 1 for at in range(start, len(text)) if brackets.closes(text[at])), len(text)
            )
            yield start, end
