"""A corpus as a suffix array over the target's tokens: built once, kept in a file when the user
names one.

The file is an .npz with the tokens, their order, and what they were made from (`VERSION`, hashes of
the corpus and of the tokenizer). The rule, so that nobody drafts from something else than they
asked for:

* no file there: the corpus is indexed and the file written;
* the file is of this corpus and this tokenizer: it is read, the corpus is not tokenized again;
* the file is an index of ours, but of another corpus, tokenizer or version: indexed anew, and
  overwritten;
* the file is damaged or no index of ours: CheckpointError, and it is left alone;
* no corpus given: the file must be there and of this tokenizer and version, else CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.drafters.lookup.corpus import corpus_hash, read_documents
from outrider.drafters.lookup.suffix_array import MAX_TOKENS, SEPARATOR, TOKEN, SuffixArray
from outrider.errors import CheckpointError, ConfigError
from outrider.wellformed import parsed_json

FORMAT = "outrider-corpus-index"
VERSION = 1


@dataclass(frozen=True)
class Origin:
    """The corpus, tokenizer and version that an index was made from."""

    tokenizer: str
    corpus: str | None  # None: any
    version: int = VERSION

    def fits(self, other: Origin) -> bool:
        same_corpus = None in (self.corpus, other.corpus) or self.corpus == other.corpus
        return same_corpus and (self.tokenizer, self.version) == (other.tokenizer, other.version)


def open_index(corpus: Path | None, index: Path | None, tokenizer: Any) -> SuffixArray:
    """The index of `corpus`, by the rule above. Raises ConfigError for an unusable corpus,
    CheckpointError for a file."""
    wanted = Origin(
        tokenizer_hash(tokenizer),
        None if corpus is None or index is None else corpus_hash(corpus, index),
    )
    if index is not None and index.exists():
        index_, origin = load_index(index)
        if origin.fits(wanted):
            return index_
        if corpus is None:
            reason = "version" if origin.version != VERSION else "tokenizer"
            raise CheckpointError(
                f"index '{index}' was made with another {reason}; give the corpus to make it anew"
            )
    if corpus is None:
        raise CheckpointError(f"there is no index at '{index}'; give the corpus to make one")
    built = SuffixArray.build(tokenize(corpus, tokenizer))
    if index is not None:
        save_index(index, built, wanted)
    return built


def tokenize(corpus: Path, tokenizer: Any) -> np.ndarray:
    """(n,) uint32: all documents' tokens, `SEPARATOR` after each. Raises ConfigError when there are
    none, or too many."""
    tokens = array("I")
    for document in read_documents(corpus):
        before = len(tokens)
        for piece in document:
            tokens.extend(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        if len(tokens) > before:
            tokens.append(SEPARATOR)
        if len(tokens) > MAX_TOKENS:
            raise ConfigError(
                f"corpus '{corpus}' has more than {MAX_TOKENS} tokens; give a part of it"
            )
    if not tokens:
        raise ConfigError(
            f"corpus: there is no text in '{corpus}'. Give a text file, a .jsonl file or a folder "
            "of them."
        )
    return np.frombuffer(tokens, dtype=np.uint32)


def tokenizer_hash(tokenizer: Any) -> str:
    """Two tokenizers with one hash make the same tokens of every text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules = f"{type(tokenizer).__name__}\0{json.dumps(sorted(tokenizer.get_vocab().items()))}"
    else:
        rules = backend.to_str()
    return hashlib.sha256(rules.encode()).hexdigest()


def save_index(path: Path, index: SuffixArray, origin: Origin) -> None:
    """Written to a temporary file and moved into place, so an interrupted run leaves no half file. Raises
    CheckpointError."""
    about = {
        "format": FORMAT,
        "version": origin.version,
        "tokenizer": origin.tokenizer,
        "corpus": origin.corpus,
    }
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            np.savez(
                stream, about=np.array(json.dumps(about)), tokens=index.tokens, order=index.order
            )
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write the index '{path}': {error}") from error


def load_index(path: Path) -> tuple[SuffixArray, Origin]:
    """The index in a file and what it was made from. Raises CheckpointError when the file is
    damaged or something else."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            about = parsed_json(str(stored["about"]))
            tokens = stored["tokens"]
            order = stored["order"]
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}")
        origin = Origin(about["tokenizer"], about["corpus"], about["version"])
        if origin.version == VERSION:
            _check(tokens, order)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"'{path}' is no usable index ({error}). Remove it to have it made anew, or name "
            "another path."
        ) from error
    return SuffixArray(tokens, order), origin


def _check(tokens: np.ndarray, order: np.ndarray) -> None:
    """Raises ValueError unless the two arrays are what `SuffixArray` takes."""
    if (
        tokens.dtype != TOKEN
        or order.dtype != np.int32
        or tokens.ndim != 1
        or tokens.shape != order.shape
    ):
        raise ValueError(
            f"tokens {tokens.dtype} {tokens.shape} and order {order.dtype} {order.shape} are no "
            "suffix array"
        )
    if len(order) == 0 or order.min() < 0 or order.max() >= len(order):
        raise ValueError("its order points outside its tokens")
