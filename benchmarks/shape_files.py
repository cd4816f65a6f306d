"""GGUF files of well-known shapes with random weights, for speeds, loads and memory.

Speeds do not depend on what the weights are, so a file of any size is made in seconds: random codes
in blocks whose scales keep sums within range, written one tensor after the other. The tokenizer is
a real one, filled up to the shape's vocabulary with words that no text has.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

TYPES = ("Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "BF16")
# where a row is no multiple of 256: what llama.cpp's own tool takes then
NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
SPREAD = 0.02  # of weights, about
ROWS_AT_ONCE = 4096
UNUSED = 5  # the type of a token that no text has
MADE_HERE = ("general.architecture", "general.file_type", "general.name")
WORDS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocabulary: int
    is_tied: bool = True

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Name, outputs and inputs of every matrix."""
        yield "token_embd.weight", self.vocabulary, self.hidden
        for layer in range(self.layers):
            parts = {
                "attn_q": (self.hidden, self.hidden),
                "attn_k": (self.kv_heads * self.head, self.hidden),
                "attn_v": (self.kv_heads * self.head, self.hidden),
                "attn_output": (self.hidden, self.hidden),
                "ffn_gate": (self.mlp, self.hidden),
                "ffn_up": (self.mlp, self.hidden),
                "ffn_down": (self.hidden, self.mlp),
            }
            for name, (outputs, inputs) in parts.items():
                yield f"blk.{layer}.{name}.weight", outputs, inputs
        if not self.is_tied:
            yield "output.weight", self.vocabulary, self.hidden

    def norms(self) -> Iterator[str]:
        """The names of all norms."""
        for layer in range(self.layers):
            yield from (f"blk.{layer}.{part}_norm.weight" for part in ("attn", "ffn"))
        yield "output_norm.weight"


SHAPES = {
    "135M": Shape(30, 576, 1536, 9, 3, 49152),  # SmolLM2
    "1B": Shape(16, 2048, 8192, 32, 8, 128256),  # Llama 3.2
    "3B": Shape(28, 3072, 8192, 24, 8, 128256),
    "8B": Shape(32, 4096, 14336, 32, 8, 128256, is_tied=False),  # Llama 3.1
}


def type_of(form: str, inputs: int) -> str:
    """The type of a matrix in a file of this type: another where it cannot hold rows so long."""
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]]
    return NARROW[form] if inputs % block else form


def num_bytes(shape: Shape, form: str) -> int:
    """Bytes of all matrices of a file."""
    total = 0
    for _, outputs, inputs in shape.matrices():
        kind = gguf.GGMLQuantizationType[type_of(form, inputs)]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        total += outputs * inputs // block * size
    return total


def file_of(shape: Shape, name: str, form: str, words: Path, folder: Path) -> Path:
    """The file of a shape and type in a folder, made where it is not there yet, with the tokenizer
    of the GGUF file `words`. Raises OSError where the disk has no room for it."""
    path = folder / f"{name}.{form}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        wanted = int(num_bytes(shape, form) * 1.05)
        if (free := shutil.disk_usage(folder).free) < 2 * wanted:
            raise OSError(
                f"{path.name} needs {wanted / 1e9:.1f} GB, and as many must stay free: the disk "
                f"has {free / 1e9:.1f} GB"
            )
        unfinished = path.with_suffix(".part")
        write(unfinished, shape, form, words)
        unfinished.rename(path)
    return path


def write(path: Path, shape: Shape, form: str, words: Path) -> None:
    """Write a file, one tensor in memory at a time."""
    source = gguf.GGUFReader(words)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(131072)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    _add_words(writer, source, shape.vocabulary)
    random = np.random.default_rng(61)
    for name, outputs, inputs in shape.matrices():
        kind = gguf.GGMLQuantizationType[type_of(form, inputs)]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        width = inputs // block * size
        writer.add_tensor_info(
            name, (outputs, width), np.dtype(np.uint8), outputs * width, raw_dtype=kind
        )
    for name in shape.norms():
        size = shape.hidden * 4
        writer.add_tensor_info(name, (shape.hidden,), np.dtype(np.float32), size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, outputs, inputs in shape.matrices():
        writer.write_tensor_data(random_rows(random, type_of(form, inputs), outputs, inputs))
    for _ in shape.norms():
        writer.write_tensor_data(np.ones(shape.hidden, np.float32))
    writer.close()


def _add_words(writer: gguf.GGUFWriter, source: gguf.GGUFReader, vocabulary: int) -> None:
    """The tokenizer of another file, cut to a vocabulary or filled up with unused words."""
    for field in source.fields.values():
        if not field.name.startswith("tokenizer.") or field.name in WORDS:
            continue
        parts = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=parts)
    texts = source.fields[WORDS[0]].contents()[:vocabulary]
    kinds = source.fields[WORDS[1]].contents()[:vocabulary]
    missing = range(len(texts), vocabulary)
    writer.add_token_list([*texts, *(f"<|unused_{number}|>" for number in missing)])
    writer.add_token_types([*kinds, *(UNUSED for _ in missing)])


def random_rows(random: np.random.Generator, form: str, outputs: int, inputs: int) -> np.ndarray:
    """Rows of a matrix as a file has them (outputs, bytes of a row) uint8."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]]
    rows = np.empty((outputs, inputs // block, size), np.uint8)
    for start in range(0, outputs, ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        if form == "BF16":
            values = random.standard_normal(part.shape[:2], np.float32) * np.float32(SPREAD)
            part[:] = (
                (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(part.shape)
            )
            continue
        part[:] = np.frombuffer(random.bytes(part.size), np.uint8).reshape(part.shape)
        _FACTORS[form](part)
    return rows.reshape(outputs, -1)


def _put(part: np.ndarray, at: int, value: float) -> None:
    part[..., at : at + 2] = np.array([value], np.float16).view(np.uint8)


def _q4_0(part: np.ndarray) -> None:
    _put(part, 0, SPREAD / 4.6)


def _q4_1(part: np.ndarray) -> None:
    _put(part, 0, SPREAD / 4.6)
    _put(part, 2, -7.5 * SPREAD / 4.6)


def _q4_k(part: np.ndarray) -> None:
    """Steps and shifts are the same six random bits, so that weights are around zero."""
    part[..., 8:12] = part[..., 4:8]
    part[..., 12:16] = (part[..., 12:16] & 15) * 17
    _put(part, 0, SPREAD / 4.6 / 32)
    _put(part, 2, 7.5 * SPREAD / 4.6 / 32)


def _q6_k(part: np.ndarray) -> None:
    part[..., 192:208] = part[..., 192:208] % 16 + 1
    _put(part, 208, SPREAD / 18.5 / 9)


def _q5_0(part: np.ndarray) -> None:
    _put(part, 0, SPREAD / 9.2)


def _q8_0(part: np.ndarray) -> None:
    _put(part, 0, SPREAD / 74)


_FACTORS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_0": _q5_0, "Q6_K": _q6_k, "Q8_0": _q8_0
}  # fmt: skip
