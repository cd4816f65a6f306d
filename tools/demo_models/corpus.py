"""Training text of the demo pair: read, format, tokenize, pack.

Every document is `<s>Question: ...\nAnswer: ...</s>` or `<s>` Python `</s>`; the chat template in
`tokenizer.py` maps conversations onto the same form. Sources: GSM8K's TRAIN split, MATH,
TheAlgorithms/Python, and generated problems. The test splits of GSM8K, HumanEval and Spec-Bench are
never read here.

Batches are a pure function of (seed, step), so that a resumed run continues with exactly the
batches it would have seen: there is no reader state to save. Documents are drawn with replacement
and packed whole; the last one of a sequence is cut. One document in `HELD_OUT_ONE_IN` of each
source is kept for the loss per source.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from tools.demo_models.problems import GRADES, problems

BOS = "<s>"
EOS = "</s>"
BOS_ID = 0
EOS_ID = 1
HELD_OUT_ONE_IN = 50
ANSWER_MARKER = "\nAnswer:"
# of a question's tokens in the loss: they are drawn by lot, and nobody asks the model for them
PROMPT_WEIGHT = 0.1
# longer documents (Python files) are cut into pieces that a short sequence can hold
MAX_PIECE_TOKENS = 512

_CALCULATOR = re.compile(r"<<[^>]*>>")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
_SPACED_OPERATOR = re.compile(r"(?<=[\d)%])\s*([-+*/=])\s*(?=\$?[\d(.])")


def document(question: str, solution: str) -> str:
    return f"{BOS}Question: {question.strip()}{ANSWER_MARKER} {solution.strip()}{EOS}"


def code_document(text: str) -> str:
    return f"{BOS}{text.strip()}{EOS}"


def compact_gsm8k(text: str) -> str:
    """GSM8K text in the form of our own steps: no calculator marks, no thousands commas, `48/2=24`
    unspaced.
    """
    text = _THOUSANDS.sub("", _CALCULATOR.sub("", text))
    return _SPACED_OPERATOR.sub(r"\1", text)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def gsm8k_documents(data: Path) -> Iterator[str]:
    for row in _rows(data / "gsm8k" / "train.jsonl"):
        yield document(compact_gsm8k(row["question"]), compact_gsm8k(row["answer"]))


def math_documents(data: Path) -> Iterator[str]:
    for row in _rows(data / "math" / "problems.jsonl"):
        yield document(row["problem"], row["solution"])


def python_documents(data: Path) -> Iterator[str]:
    for row in _rows(data / "code" / "python.jsonl"):
        if len(row["text"]) > 200:  # empty package files teach nothing
            yield code_document(row["text"])


FILE_SOURCES: dict[str, Callable[[Path], Iterator[str]]] = {
    "gsm8k": gsm8k_documents,
    "math": math_documents,
    "python": python_documents,
}


def generated_documents(grade: int, count: int, *, held_out: bool = False) -> Iterator[str]:
    for problem in islice(problems(grade, held_out=held_out, weights={grade: 1.0}), count):
        yield document(problem.question, problem.solution)


def drill_documents(count: int, *, held_out: bool = False) -> Iterator[str]:
    """Bare equations, a dozen to a document: eight tokens each, where a word problem spends forty
    on one."""
    rng = Random(f"drill/{held_out}")
    for _ in range(count):
        equations = "\n".join(_equation(rng) for _ in range(rng.randint(8, 16)))
        yield f"{BOS}{equations}{EOS}"


def _equation(rng: Random) -> str:
    high = rng.choice((20, 20, 40, 99))
    a = rng.randint(1, high)
    b = rng.randint(1, high)
    x = rng.randint(2, 12)
    y = rng.randint(2, 12)
    kind = rng.choices("+-*/", (0.4, 0.35, 0.17, 0.08))[0]
    return {
        "+": f"{a}+{b}={a + b}",
        "-": f"{max(a, b)}-{min(a, b)}={abs(a - b)}",
        "*": f"{x}*{y}={x * y}",
        "/": f"{x * y}/{x}={y}",
    }[kind]


def is_held_out_document(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def source_documents(name: str, data: Path, *, held_out: bool, num_generated: int) -> Iterator[str]:
    """All documents of one split of one source; `grade1` ... are the generated ones."""
    if name.startswith("grade"):
        yield from generated_documents(
            int(name.removeprefix("grade")), num_generated, held_out=held_out
        )
        return
    if name == "drill":
        yield from drill_documents(num_generated, held_out=held_out)
        return
    for text in FILE_SOURCES[name](data):
        if is_held_out_document(text) == held_out:
            yield text


SOURCES = (*(f"grade{grade}" for grade in GRADES), "drill", *FILE_SOURCES)


# ------------------------------------------------------------------------------------------- token arrays
@dataclass(frozen=True)
class TokenSource:
    """Tokenized documents of one source, concatenated; document i is `tokens[starts[i]:starts[i +
    1]]`."""

    tokens: np.ndarray  # (T,) uint16
    starts: np.ndarray  # (documents + 1,) int64

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def mean_length(self) -> float:
        return len(self.tokens) / len(self)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> TokenSource:
    pieces: list[np.ndarray] = []
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    for encoding in encodings:
        ids = np.asarray(encoding.ids, dtype=np.uint16)
        pieces += [ids[at : at + MAX_PIECE_TOKENS] for at in range(0, len(ids), MAX_PIECE_TOKENS)]
    return TokenSource(np.concatenate(pieces), np.cumsum([0] + [len(piece) for piece in pieces]))


def save_sources(sources: dict[str, TokenSource], path: Path) -> None:
    arrays = {}
    for name, source in sources.items():
        arrays[f"{name}.tokens"], arrays[f"{name}.starts"] = source.tokens, source.starts
    np.savez(path, **arrays)  # type: ignore[arg-type]  # the stub takes ** for savez's own flag


def load_sources(path: Path) -> dict[str, TokenSource]:
    with np.load(path) as arrays:
        return {
            name: TokenSource(arrays[f"{name}.tokens"], arrays[f"{name}.starts"])
            for name in SOURCES
        }


def answer_start(piece: np.ndarray, marker: np.ndarray) -> int:
    """Index of the first token after `marker` (the tokens of `\\nAnswer:`), 0 where there is none."""
    if len(piece) < len(marker):
        return 0
    windows = np.lib.stride_tricks.sliding_window_view(piece, len(marker))
    found = np.flatnonzero((windows == marker).all(axis=1))
    return int(found[0]) + len(marker) if len(found) else 0


# ------------------------------------------------------------------------------------------------ batches
# Share of TOKENS by source, at the start and at the end of training, linear in between: small
# numbers and short solutions first, the whole range later.
MIX_START = {
    "grade1": 0.22,
    "grade2": 0.22,
    "grade3": 0.14,
    "grade4": 0.03,
    "grade5": 0.02,
    "drill": 0.20,
    "gsm8k": 0.09,
    "math": 0.04,
    "python": 0.04,
}
MIX_END = {
    "grade1": 0.13,
    "grade2": 0.20,
    "grade3": 0.24,
    "grade4": 0.08,
    "grade5": 0.05,
    "drill": 0.12,
    "gsm8k": 0.10,
    "math": 0.04,
    "python": 0.04,
}
MIX_RAMP = 0.5  # fraction of training after which the final mix is reached


def mix(progress: float) -> dict[str, float]:
    weight = min(progress / MIX_RAMP, 1.0)
    return {name: (1 - weight) * MIX_START[name] + weight * MIX_END[name] for name in SOURCES}


@dataclass(frozen=True)
class Batch:
    tokens: np.ndarray  # (rows, length + 1) int64; inputs are `[:, :-1]`, labels `[:, 1:]`
    weights: np.ndarray  # (rows, length) float32, of each label in the loss


def batch(
    sources: dict[str, TokenSource],
    marker: np.ndarray,
    seed: int,
    step: int,
    progress: float,
    rows: int,
    length: int,
) -> Batch:
    """The packed sequences of one step; `marker` is what separates a question from its answer."""
    rng = np.random.default_rng((seed, step))
    shares = mix(progress)
    # token share -> documents
    odds = np.array([shares[name] / sources[name].mean_length for name in SOURCES])
    drawn = [_packed_row(sources, marker, rng, odds / odds.sum(), length + 1) for _ in range(rows)]
    tokens, weights = (np.stack(parts) for parts in zip(*drawn, strict=True))
    return Batch(tokens.astype(np.int64), weights[:, 1:])


def _packed_row(
    sources: dict[str, TokenSource],
    marker: np.ndarray,
    rng: np.random.Generator,
    odds: np.ndarray,
    length: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(length,) tokens and the weight of each."""
    pieces = []
    weights = []
    filled = 0
    while filled < length:
        source = sources[SOURCES[rng.choice(len(SOURCES), p=odds)]]
        piece = source[int(rng.integers(len(source)))]
        weight = np.ones(len(piece), dtype=np.float32)
        weight[: answer_start(piece, marker)] = PROMPT_WEIGHT
        pieces.append(piece)
        weights.append(weight)
        filled += len(piece)
    return np.concatenate(pieces)[:length], np.concatenate(weights)[:length]
