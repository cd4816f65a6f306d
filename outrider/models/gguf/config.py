"""The config of a GGUF checkpoint: what the row of its architecture says, and what files of all
architectures say alike.

Common are the ends of turns, sizes of heads, scaled rotary positions, and recommended sampling.
What the file leaves open is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import CapabilityError, CheckpointError
from outrider.lazy import transformers
from outrider.models.gguf import library
from outrider.models.gguf.architectures import (
    LATENT,
    OWN,
    PART,
    TOKENS,
    Architecture,
    own_config,
    row_of,
)
from outrider.models.gguf.header import ORIGINAL, GgufFile, long_list

if TYPE_CHECKING:
    from transformers import GenerationConfig

END_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
# Control tokens that llama.cpp takes for an end, whatever the file calls them (llama-vocab.cpp).
END_NAMES = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
))  # fmt: skip
# end answers where there are both; <|end|> then ends a thought
HARMONY = frozenset(("<|return|>", "<|call|>"))
CONTROL = 3  # a token's type
# Sampling that a file recommends -> generation_config's name
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
YARN = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
DRAFT_HEADS = ("eagle3", "dflash", "gemma4-assistant")  # which `models/heads/` reads
DTYPES = {  # of plain weights
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
}  # fmt: skip


def gguf_config(file: GgufFile) -> Any:
    """The config of transformers' class for this checkpoint.

    Raises CapabilityError for an architecture or a kind of positions that is not read from GGUF.
    """
    if file.architecture in DRAFT_HEADS:
        raise CheckpointError(
            f"'{file.path}' holds a draft head and no model. Use it with --draft, together with its "
            "target."
        )
    row = row_of(file)
    values = own_config(file, row)
    values["num_hidden_layers"] -= num_extra_layers(file)
    if values.get("sliding_window") == 0:
        values["sliding_window"] = None
    if ends := end_tokens(file):
        values["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if row.positions != OWN:
        _complete_positions(values, file, row)
    try:
        config = transformers.AutoConfig.for_model(**values)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"'{file.path}' describes no model that transformers can make: {reason}"
        ) from error
    config.dtype = own_dtype(file)
    config.name_or_path = str(file.path)
    return config


def gguf_generation_config(file: GgufFile, config: Any) -> GenerationConfig:
    """The file's end tokens, and the sampling that it recommends (`general.sampling.*`), in the
    form of a generation_config."""
    generation_config = transformers.GenerationConfig.from_model_config(config)
    for name, value in recommended(file).items():
        setattr(generation_config, name, value)
    return generation_config


def recommended(file: GgufFile) -> dict[str, Any]:
    """The sampling that a file recommends, by generation_config's names; an fp32 0.6 is meant as
    0.6."""
    values = {
        ours: file.metadata.get(f"general.sampling.{name}") for name, ours in SAMPLING.items()
    }
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in values.items()
        if value is not None
    }


def own_dtype(file: GgufFile) -> torch.dtype:
    """The dtype of computation: bfloat16 where weights are in blocks, otherwise the type of most
    weights."""
    counts: dict[torch.dtype, int] = {}
    for tensor in file.tensors:
        dtype = DTYPES.get(tensor.kind.name, torch.bfloat16)
        counts[dtype] = counts.get(dtype, 0) + (tensor.num_weights if len(tensor.shape) > 1 else 0)
    return max(counts, key=lambda dtype: counts[dtype])


def end_tokens(file: GgufFile) -> list[int]:
    """Ids of all tokens that end an answer: those the metadata names, and control tokens of a known
    name."""
    ids = {file.metadata[key] for key in END_KEYS if isinstance(file.metadata.get(key), int)}
    kinds = "tokenizer.ggml.token_type"
    if TOKENS in file.metadata and kinds in file.metadata:
        marked = zip(long_list(file, TOKENS), long_list(file, kinds), strict=False)
        named = {
            text: token
            for token, (text, kind) in enumerate(marked)
            if kind == CONTROL and text in END_NAMES
        }
        if named.keys() >= HARMONY:
            named.pop("<|end|>", None)
        ids |= set(named.values())
    return sorted(ids)


def rope_factors(file: GgufFile, name: str = "rope_freqs.weight") -> torch.Tensor | None:
    """The divisor of each rotary frequency, (head size / 2,) fp32; None where the file has no such
    tensor."""
    tensor = next((tensor for tensor in file.tensors if tensor.name == name), None)
    return (
        None
        if tensor is None
        else torch.from_numpy(library.dequantize(tensor.read(), tensor.kind).copy())
    )


def num_extra_layers(file: GgufFile) -> int:
    """Layers after the model's own that predict further tokens (nextn, multi-token prediction)."""
    return int(file.of_model("nextn_predict_layers", 0) or 0)


def _complete_positions(values: dict[str, Any], file: GgufFile, row: Architecture) -> None:
    """Add how much of each head is rotated, and how positions are scaled, in place."""
    rotated = file.of_model("rope.dimension_count")
    size = values["head_dim"]
    if rotated and rotated != size and row.positions != LATENT:
        if row.positions != PART:
            raise CapabilityError(
                f"'{file.path}' rotates {rotated} of the {size} numbers of a head, which "
                f"transformers' {file.architecture} "
                f"does not. {ORIGINAL}"
            )
        values["partial_rotary_factor"] = rotated / size
    scaling = rope_scaling(file)
    more = values.pop("rope_scaling", {})
    if "rope_parameters" not in values:
        values |= {} if scaling is None else {"rope_scaling": scaling | more}
    elif "full_attention" in values["rope_parameters"]:
        values["rope_parameters"]["full_attention"] |= scaling or {}
    else:
        values["rope_parameters"] = (
            {"rope_type": "default"} | (scaling or {}) | values["rope_parameters"]
        )


def rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    """How rotary positions are scaled, as transformers' configs say it; None where they are not."""
    kind = file.of_model("rope.scaling.type")
    factor = file.of_model("rope.scaling.factor", file.of_model("rope.scale_linear"))
    original = file.of_model("rope.scaling.original_context_length")
    short, long = (rope_factors(file, f"rope_factors_{name}.weight") for name in ("short", "long"))
    if short is not None and long is not None:
        context = file.of_model("context_length")
        return {
            "rope_type": "longrope",
            "short_factor": short.tolist(),
            "long_factor": long.tolist(),
            "original_max_position_embeddings": original or context,
            "factor": context / (original or context),
        }
    if kind in (None, "none") or factor in (None, 0, 1):
        return None if factor in (None, 0, 1) else {"rope_type": "linear", "factor": factor}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        scaling = {
            name: file.of_model(f"rope.scaling.yarn_{theirs}") for theirs, name in YARN.items()
        }
        said = {name: value for name, value in scaling.items() if value is not None}
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **said,
        }
    raise CapabilityError(
        f"'{file.path}' scales its positions by '{kind}', which a GGUF file does not describe "
        f"fully. {ORIGINAL}"
    )
