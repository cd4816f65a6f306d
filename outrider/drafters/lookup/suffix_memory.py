"""The texts of finished rows: a suffix tree over a bounded number of tokens, kept in a file between
runs.

The oldest texts leave when a new one does not fit; the tree then is as if they had never been
there, and their memory is free. The file is JSON, because it is small, inspectable and cannot run
code: format, version, size of the vocabulary and the token sequences, oldest first. It is replaced
in one move, so a crash leaves the old one. Two processes with one file: the last wins.
"""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.drafters.lookup.suffix_tree import END, SuffixTree
from outrider.errors import CheckpointError
from outrider.wellformed import load_json

FORMAT = "outrider suffix memory"
VERSION = 1


class SuffixMemory:
    """Past texts of at most `max_tokens` tokens together (each counts one more, for its end). 0
    remembers nothing."""

    def __init__(self, max_depth: int, max_tokens: int) -> None:
        self.tree = SuffixTree(max_depth)
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._texts: deque[array[int]] = deque()  # oldest first, each with its END

    @property
    def sequences(self) -> list[list[int]]:
        """The texts, oldest first."""
        return [text[:-1].tolist() for text in self._texts]

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text; of one that is too long, its end. Costs microseconds a token, and as
        much for what leaves."""
        text = array("i", [*tokens[-max(0, self.max_tokens - 1) :], END])
        if len(text) < 2 or self.max_tokens < 2:
            return
        while self.num_tokens + len(text) > self.max_tokens:
            oldest = self._texts.popleft()
            self.tree.remove(oldest)
            self.num_tokens -= len(oldest)
        self.tree.add(text)
        self._texts.append(text)
        self.num_tokens += len(text)

    def save(self, path: Path, vocab_size: int) -> None:
        """Write the texts to `path`. Raises CheckpointError when that is impossible; an earlier
        file then stays."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "vocab_size": vocab_size,
            "sequences": self.sequences,
        }
        try:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(content, file, separators=(",", ":"))
                os.replace(name, path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise CheckpointError(
                f"cannot write the suffix cache '{path}': {error.strerror or error}"
            ) from error

    def load(self, path: Path, vocab_size: int) -> None:
        """Add the texts of a saved file. Raises CheckpointError when it is damaged or of another
        vocabulary."""
        for sequence in _read(path, vocab_size):
            self.add(sequence)


def _read(path: Path, vocab_size: int) -> list[list[int]]:
    remedy = "Delete it to start with an empty one, or name another file."
    try:
        content = load_json(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot read the suffix cache '{path}': {error.strerror or error}"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"the suffix cache '{path}' is damaged: it is no JSON. {remedy}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"'{path}' is no suffix cache. {remedy}")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"the suffix cache '{path}' has version {content.get('version')}, expected {VERSION}. "
            f"{remedy}"
        )
    if content.get("vocab_size") != vocab_size:
        raise CheckpointError(
            f"the suffix cache '{path}' is of another model: its vocabulary has "
            f"{content.get('vocab_size')} tokens, "
            f"the target's {vocab_size}. {remedy}"
        )
    sequences = content.get("sequences")
    if not isinstance(sequences, list) or not all(
        _is_text(sequence, vocab_size) for sequence in sequences
    ):
        raise CheckpointError(
            f"the suffix cache '{path}' is damaged: its sequences are no lists of token ids. "
            f"{remedy}"
        )
    return sequences


def _is_text(sequence: Any, vocab_size: int) -> bool:
    return isinstance(sequence, list) and all(
        type(token) is int and 0 <= token < vocab_size for token in sequence
    )
