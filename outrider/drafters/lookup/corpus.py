"""Documents of a user's corpus: a text file, a JSONL file, or a folder of such files, as pieces of
text.

* A text file is one document.
* `.jsonl`: each line is an object and one document: the strings under its text-like names
  (`TEXT_FIELDS`), lists and
  objects below them included, in the order they are written, one per line. So {"question": ...,
  "answer": ...}, {"text": ...} and {"messages": [{"role": ..., "content": ...}, ...]} are all read
  as one would read them aloud.
* A folder: all files below it in the order of their paths; hidden ones, and ones that are not UTF-8
  text, are passed over.

Everything is read in pieces of about a megabyte, cut at line ends, so a corpus may be larger than
memory for its text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.wellformed import parsed_json

TEXT_FIELDS = (
    "text", "content", "code", "prompt", "question", "problem", "instruction", "input", "turns", "messages",
    "conversations", "value", "completion", "response", "output", "answer", "solution", "canonical_solution",
)  # fmt: skip
PIECE = 1 << 20  # characters read at once


def check_corpus(path: Path) -> None:
    """Raises ConfigError when there is nothing at `path`, or it is an empty file. Reads nothing."""
    if not path.exists():
        raise ConfigError(
            f"corpus: there is nothing at '{path}'. Give a text file, a .jsonl file or a folder "
            "of them."
        )
    if path.is_file() and path.stat().st_size == 0:
        raise ConfigError(f"corpus: '{path}' is empty")


def corpus_hash(path: Path, besides: Path) -> str:
    """SHA-256 of all file contents and of their paths in the folder: another text has another hash.
    `besides`: no text, if it is there."""
    total = hashlib.sha256()
    for file in _files(path):
        if file.resolve() == besides.resolve():
            continue
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        total.update(f"{file.relative_to(path).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def read_documents(path: Path) -> Iterator[Iterator[str]]:
    """Documents, each as its pieces; exhaust one before the next. Raises ConfigError where a file
    is not what it should be."""
    in_folder = path.is_dir()
    for file in _files(path):
        if not _is_text(file):
            if in_folder:
                continue
            raise ConfigError(f"corpus: '{file}' is not UTF-8 text")
        if file.suffix == ".jsonl":
            yield from (iter([document]) for document in _json_documents(file))
        else:
            yield _pieces(file)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    below = (file for file in path.rglob("*") if file.is_file())
    return sorted(
        file
        for file in below
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def _is_text(file: Path) -> bool:
    """UTF-8 without NUL, to the last byte."""
    try:
        return all("\0" not in piece for piece in _pieces(file))
    except UnicodeDecodeError:
        return False


def _pieces(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8", newline="") as stream:
        while piece := stream.read(PIECE):
            yield piece + stream.readline(PIECE)


def _json_documents(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                item = parsed_json(line)
            except ValueError as error:
                raise ConfigError(f"corpus: '{file}' line {number} is not JSON: {error}") from error
            if not isinstance(item, dict) or not any(field in item for field in TEXT_FIELDS):
                names = ", ".join(item) if isinstance(item, dict) else type(item).__name__
                raise ConfigError(
                    f"corpus: '{file}' line {number} has no text field, it has: {names}. "
                    f"Known text fields: {', '.join(TEXT_FIELDS)}."
                )
            # no tokenizer takes halves of characters
            yield "\n".join(_strings(item)).encode(errors="replace").decode()


def _strings(item: Any) -> Iterator[str]:
    """Texts of a JSON value: itself, a list's, or those under an object's text-like names."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, list):
        for part in item:
            yield from _strings(part)
    elif isinstance(item, dict):
        for name, part in item.items():
            if name in TEXT_FIELDS:
                yield from _strings(part)
