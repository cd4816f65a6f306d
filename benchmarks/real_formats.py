"""One GGUF file in the forms that the engines of `real_model.py` read: other block formats, and a
bf16 folder.

All hold the values of the file they were made from, rounded to their own format, so every engine
decodes the same model up to that rounding. They are made once and kept below `.peers/models/real`.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import gguf
from workload import PEERS

CACHE = PEERS / "models" / "real"
FILE_TYPES = {"Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "BF16": gguf.LlamaFileType.MOSTLY_BF16}
MADE_ANEW = ("general.architecture", "general.file_type")  # by the writer, or here


def own_format(source: Path) -> str:
    """The format of most of a file's matrices: "Q4_1"."""
    kinds = [
        tensor.tensor_type.name
        for tensor in gguf.GGUFReader(source).tensors
        if len(tensor.shape) > 1
    ]
    return max(set(kinds), key=kinds.count)


def converted(source: Path, form: str, cache: Path = CACHE) -> Path:
    """`source` with every matrix in the format `form`; the file itself where most of it is in that
    format already."""
    if own_format(source) == form:
        return source
    path = (
        cache
        / f"{source.stem.removesuffix('.' + own_format(source))}-{_digest(source)}.{form}.gguf"
    )
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        _write(gguf.GGUFReader(source), unfinished, form)
        unfinished.rename(path)
    return path


def _write(reader: gguf.GGUFReader, path: Path, form: str) -> None:
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(FILE_TYPES[form])
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in MADE_ANEW:
            parts = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=parts)
    kind = gguf.GGMLQuantizationType[form]
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bf16_folder(source: Path, cache: Path = CACHE) -> Path:
    """The file as a transformers checkpoint: every weight widened by transformers and rounded to
    bf16, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = cache / f"{source.stem}-{_digest(source)}-bf16"
    if not folder.exists():
        unfinished = folder.with_name(folder.name + ".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
        widened = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.bfloat16, quantization_config=widened
        )
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(**where).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]
