"""A Llama checkpoint as a GGUF file, bit for bit: matrices stay bf16, norms become fp32.

llama.cpp rotates neighbouring dimensions where transformers rotates halves, so the rows of the
query and key projections are reordered. The vocabulary is stored because the format wants one; the
benchmark sends token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from protocol import export_name


def exported(checkpoint: Path, cache: Path) -> Path:
    """The GGUF file of a checkpoint folder, written once into the cache folder."""
    path = cache / f"{export_name(checkpoint)}.gguf"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        _write(checkpoint, unfinished)
        unfinished.rename(path)
    return path


def _write(checkpoint: Path, path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(
            f"only Llama checkpoints are exported to GGUF here, not {config['model_type']}"
        )
    writer = gguf.GGUFWriter(path, "llama")
    _write_shape(writer, config)
    _write_vocabulary(
        writer, json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8")), config
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, bits in _bf16_tensors(checkpoint):
        projection = name.split(".")[-2]
        data = _neighbouring_rotation(bits, heads[projection]) if projection in heads else bits
        target = names.get_name(name, try_suffixes=(".weight",))
        if target is None:
            raise ValueError(f"no GGUF name for tensor {name}")
        if data.ndim == 1:
            writer.add_tensor(target, (data.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(data).view(np.uint8)
            writer.add_tensor(
                target, raw, raw_shape=raw.shape, raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _write_vocabulary(
    writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]
) -> None:
    by_id = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    special = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = [special.get(i) or by_id.get(i, f"<unused_{i}>") for i in range(config["vocab_size"])]
    types = [
        gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL
        for i in range(config["vocab_size"])
    ]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _bf16_tensors(checkpoint: Path) -> list[tuple[str, np.ndarray]]:
    """Every tensor as its 16 raw bits: numpy has no bf16; safetensors is a JSON header, then plain
    bytes."""
    found = []
    for file in sorted(checkpoint.glob("*.safetensors")):
        header_length = int.from_bytes(file.open("rb").read(8), "little")
        blob = np.memmap(file, dtype=np.uint8, mode="r")
        header = json.loads(bytes(blob[8 : 8 + header_length]))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{file.name}: {name} is {entry['dtype']}, expected BF16")
            start, end = (8 + header_length + offset for offset in entry["data_offsets"])
            found.append(
                (name, np.frombuffer(blob[start:end].tobytes(), np.uint16).reshape(entry["shape"]))
            )
    return found


def _neighbouring_rotation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (first halves, second halves) to (first, second, first, second ...)."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)
