"""The config of a GGUF checkpoint: transformers' own table of metadata, ours (`architectures.py`), and what both leave out.

transformers reads the file through gguf's slow reader, so it is given an extract: the same metadata without the long lists, the
same tensors without their weights. What it ignores would make another model of some files and is added here: scaled rotary
positions, heads of their own size, biases, soft caps, windows, the ends of turns. What the file leaves open is refused.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.errors import CapabilityError, CheckpointError
from outrider.lazy import transformers
from outrider.models.gguf import library
from outrider.models.gguf.architectures import ARCHITECTURES, TOKENS, own_config
from outrider.models.gguf.header import ORIGINAL, Count, GgufFile, long_list

if TYPE_CHECKING:
    from gguf import GGUFValueType
    from transformers import GenerationConfig

END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Control tokens that llama.cpp takes for an end, whatever the file calls them (llama-vocab.cpp).
END_NAMES = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
))  # fmt: skip
HARMONY = frozenset(("<|return|>", "<|call|>"))  # end answers where there are both; <|end|> then ends a thought
CONTROL = 3  # a token's type
LEFT_OUT = ("split.", "gpt-oss.rope.scaling.")  # beginnings of keys that transformers is not given; it misreads the second kind
# Sampling that a file recommends -> generation_config's name
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
SHAPED_ELSEWHERE = (  # by the tables of metadata
    "gemma3n", "gemma4", "granitehybrid", "lfm2", "lfm2moe", "mamba", "mimo2", "nemotron_h", "nemotron_h_moe",
)  # fmt: skip
PARTLY_ROTATED = (  # by a factor in config
    "bailingmoe2", "glm4", "glm4moe", "nemotron", "phi2", "phi3", "qwen35", "qwen35moe", "qwen3next", "stablelm",
)  # fmt: skip
LATENTS = ("deepseek2", "deepseek32", "glm-dsa")  # which heads are made of
YARN = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
DRAFT_HEADS = ("eagle3", "dflash", "gemma4-assistant")  # which `models/heads/` reads
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, whose queries are scaled by another number
DTYPES = {  # of plain weights
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
}  # fmt: skip


def gguf_config(file: GgufFile) -> Any:
    """The config of transformers' class for this checkpoint.

    Raises CapabilityError for an architecture or a kind of positions that transformers cannot make of a GGUF file.
    """
    if file.architecture in DRAFT_HEADS:
        raise CheckpointError(f"'{file.path}' holds a draft head and no model. Use it with --draft, beside its target.")
    own = ARCHITECTURES.get(file.architecture)
    found = _by_transformers(file) if own is None else own_config(file, own)
    found.pop("_model_name_or_path", None)
    found.setdefault("pad_token_id", None)  # else the class's own, perhaps beyond this vocabulary
    _complete(found, file)
    try:
        config = transformers.AutoConfig.for_model(**found)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"'{file.path}' describes no model that transformers can make: {reason}") from error
    config.dtype = own_dtype(file)
    config.name_or_path = str(file.path)
    return config


def gguf_generation_config(file: GgufFile, config: Any) -> GenerationConfig:
    """The file's end tokens, and the sampling that it recommends (`general.sampling.*`), in the form of a generation_config."""
    made = transformers.GenerationConfig.from_model_config(config)
    for theirs, ours in SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{theirs}")
        if value is not None:
            setattr(
                made, ours, float(f"{value:.6g}") if isinstance(value, float) else value
            )  # an fp32 0.6 is meant as 0.6
    return made


def own_dtype(file: GgufFile) -> torch.dtype:
    """What the checkpoint is computed in: bfloat16 where weights are in blocks, else the type of most of its weights."""
    counts: dict[torch.dtype, int] = {}
    for tensor in file.tensors:
        dtype = DTYPES.get(tensor.kind.name, torch.bfloat16)
        counts[dtype] = counts.get(dtype, 0) + (tensor.num_weights if len(tensor.shape) > 1 else 0)
    return max(counts, key=lambda dtype: counts[dtype])


def end_tokens(file: GgufFile) -> list[int]:
    """Ids of all tokens that end an answer: those the metadata names, and control tokens of a known name."""
    found = {file.metadata[key] for key in END_KEYS if isinstance(file.metadata.get(key), int)}
    kinds = "tokenizer.ggml.token_type"
    if TOKENS in file.metadata and kinds in file.metadata:
        marked = zip(long_list(file, TOKENS), long_list(file, kinds), strict=False)
        named = {text: token for token, (text, kind) in enumerate(marked) if kind == CONTROL and text in END_NAMES}
        if named.keys() >= HARMONY:
            named.pop("<|end|>", None)
        found |= set(named.values())
    return sorted(found)


def rope_factors(file: GgufFile, name: str = "rope_freqs.weight") -> torch.Tensor | None:
    """What each rotary frequency is divided by, (head size / 2,) fp32; None where the file has no such tensor."""
    tensor = next((tensor for tensor in file.tensors if tensor.name == name), None)
    return None if tensor is None else torch.from_numpy(library.dequantize(tensor.read(), tensor.kind).copy())


def num_extra_layers(file: GgufFile) -> int:
    """Layers behind the model's own that predict further tokens (nextn, multi-token prediction)."""
    return int(file.of_model("nextn_predict_layers", 0) or 0)


def _by_transformers(file: GgufFile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stderr(io.StringIO()):
        extract = Path(scratch) / "extract.gguf"
        _write_extract(file, extract)
        try:
            return dict(transformers.modeling_gguf_pytorch_utils.load_gguf_checkpoint(str(extract))["config"])
        except Exception as error:
            if "not supported" in str(error):
                read = transformers.modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES
                known = ", ".join(sorted(name for name in read if name not in ("general", "tokenizer")))
                raise CapabilityError(
                    f"'{file.path}' is a model of architecture '{file.architecture}', which transformers does not read from GGUF "
                    f"(it reads {known}; Outrider adds {', '.join(ARCHITECTURES)}). {ORIGINAL}"
                ) from error
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise CheckpointError(f"cannot read the config of '{file.path}': {reason}") from error


def _write_extract(file: GgufFile, path: Path) -> None:
    """A GGUF file of a few kilobytes with this one's metadata, but for long lists, and its tensors' names."""
    writer = library.GGUFWriter(path, file.architecture)
    for key, value in file.metadata.items():
        kind = _kind_of(value)
        if key == "general.architecture" or key.startswith(LEFT_OUT) or isinstance(value, Count) or kind is None:
            continue
        if isinstance(value, list):
            writer.add_key_value(key, value, library.GGUFValueType.ARRAY, sub_type=kind)
        else:
            writer.add_key_value(key, value, kind)
    tokens = file.metadata.get(TOKENS)
    if file.of_model("vocab_size") is None and tokens is not None:
        writer.add_key_value(
            f"{file.architecture}.vocab_size",
            int(tokens) if isinstance(tokens, Count) else len(tokens),
            library.GGUFValueType.INT64,
        )
    for tensor in file.tensors:
        writer.add_tensor(tensor.name, np.zeros(1, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind_of(value: Any) -> GGUFValueType | None:
    first = value[0] if isinstance(value, list) and value else value
    for kind, name in ((bool, "BOOL"), (int, "INT64"), (float, "FLOAT64"), (str, "STRING")):
        if isinstance(first, kind):
            return library.GGUFValueType[name]
    return None


def _complete(config: dict[str, Any], file: GgufFile) -> None:
    """Add what transformers' table leaves out, in place."""
    names = {tensor.name for tensor in file.tensors}
    architecture = file.architecture
    if ends := end_tokens(file):
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if extra := num_extra_layers(file):
        config["num_hidden_layers"] -= extra
    if architecture == "llama" and (experts := file.of_model("expert_count")):
        used, theta = file.of_model("expert_used_count"), file.of_model("rope.freq_base", 10000.0)
        config |= {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": used, "rope_theta": theta}
    if architecture == "stablelm":
        config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in names
    if "blk.0.attn_q.bias" in names and architecture in ("llama", "qwen3", "mistral"):
        config["attention_bias"] = True
    if "blk.0.ffn_up.bias" in names and architecture == "llama":
        config["mlp_bias"] = True
    if config.get("model_type") == "mistral":
        config["sliding_window"] = file.of_model("attention.sliding_window")  # the class's own is its first model's
    if architecture == "gpt2" and (positions := file.of_model("context_length")):
        config["n_positions"] = positions
    if architecture == "gemma3n":
        config["final_logit_softcapping"] = file.of_model("final_logit_softcapping", 30.0)  # llama.cpp's, where a file has none
    if architecture == "gemma4":
        config["final_logit_softcapping"] = file.of_model("final_logit_softcapping")
    if architecture in SHAPED_ELSEWHERE:
        return
    if architecture not in LATENTS:
        _complete_heads(config, file)
    if theta := file.of_model("rope.freq_base"):
        config["rope_theta"] = theta
    scaling = rope_scaling(file)
    if config["model_type"] == "olmo3":
        config["rope_parameters"]["full_attention"] |= scaling or {}
    elif "rope_parameters" in config:
        config["rope_parameters"] = {"rope_type": "default"} | (scaling or {}) | config["rope_parameters"]
    elif scaling:
        config["rope_scaling"] = scaling
    _complete_experts(config, file)
    if architecture.startswith("gemma"):
        _complete_gemma(config, file)
    if architecture == "phi3" and (window := file.of_model("attention.sliding_window")):
        config["sliding_window"] = window


def _complete_heads(config: dict[str, Any], file: GgufFile) -> None:
    """Size of the heads, and how much of each is rotated."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return
    size = file.of_model("attention.key_length") or hidden // heads
    if "head_dim" in config or size != hidden // heads or file.architecture.startswith("qwen3"):
        config["head_dim"] = size
    rotated = file.of_model("rope.dimension_count")
    if not rotated or rotated == size or file.architecture == "minimax-m2":
        return
    if file.architecture not in PARTLY_ROTATED:
        raise CapabilityError(
            f"'{file.path}' rotates {rotated} of the {size} numbers of a head, which transformers' {file.architecture} does not. "
            f"{ORIGINAL}"
        )
    config["partial_rotary_factor"] = rotated / size


def _complete_experts(config: dict[str, Any], file: GgufFile) -> None:
    for theirs, ours in (("expert", "moe_intermediate_size"), ("expert_shared", "shared_expert_intermediate_size")):
        if file.architecture in ("qwen2moe", "qwen3moe") and (size := file.of_model(f"{theirs}_feed_forward_length")):
            config[ours] = size
    if file.architecture == "gpt-oss":
        config["sliding_window"] = file.of_model("attention.sliding_window")
        if "rope_scaling" in config:
            config["rope_scaling"] |= {"truncate": False, "rope_theta": config.get("rope_theta", 10000.0)}


def rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    """How rotary positions are scaled, as transformers' configs say it; None where they are not."""
    kind, factor = (
        file.of_model("rope.scaling.type"),
        file.of_model("rope.scaling.factor", file.of_model("rope.scale_linear")),
    )
    original = file.of_model("rope.scaling.original_context_length")
    short, long = (rope_factors(file, f"rope_factors_{name}.weight") for name in ("short", "long"))
    if short is not None and long is not None:
        context = file.of_model("context_length")
        return {
            "rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist(),
            "original_max_position_embeddings": original or context, "factor": context / (original or context),
        }  # fmt: skip
    if kind in (None, "none") or factor in (None, 0, 1):
        return None if factor in (None, 0, 1) else {"rope_type": "linear", "factor": factor}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        found = {name: file.of_model(f"rope.scaling.yarn_{theirs}") for theirs, name in YARN.items()}
        if file.architecture in LATENTS and (scale := file.of_model("rope.scaling.yarn_log_multiplier")):
            found |= {"mscale": 10 * scale, "mscale_all_dim": 10 * scale}  # stored as a tenth of it
        if file.architecture == "mistral3":
            found |= {"mscale": 1.0, "mscale_all_dim": file.of_model("rope.scaling.yarn_log_multiplier")}
        said = {name: value for name, value in found.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **said}
    raise CapabilityError(
        f"'{file.path}' scales its positions by '{kind}', which a GGUF file does not describe fully. {ORIGINAL}"
    )


def _complete_gemma(config: dict[str, Any], file: GgufFile) -> None:
    for theirs, ours in (("attn", "attn_logit_softcapping"), ("final", "final_logit_softcapping")):
        if (cap := file.of_model(f"{theirs}_logit_softcapping")) is not None:
            config[ours] = cap
    if file.architecture in LARGEST_GEMMA:
        is_largest = file.of_model("block_count") == LARGEST_GEMMA[file.architecture]
        per_head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = per_head if is_largest else config.get("head_dim", per_head)
