"""From a name to a model that has passed its probes: a hub id or a local folder in, `LoadedModel`
out.

transformers owns checkpoints, architectures and tokenizers. Ours are the refusals: a checkpoint
that is missing, damaged or incomplete, something that is no decoder-only language model, a model
our cache cannot reproduce. All of them speak before the first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outrider.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    OutriderError,
    did_you_mean,
    first_line,
    near_path,
)
from outrider.instructions import of_this_cpu
from outrider.lazy import transformers
from outrider.models import attention
from outrider.models.gguf.config import gguf_config
from outrider.models.gguf.linear import block_layers
from outrider.models.gguf.packing import Packer, by_torch
from outrider.models.gguf.tokenizer import gguf_tokenizer
from outrider.models.gguf.weights import gguf_module
from outrider.models.indexer import indexer_layers
from outrider.models.linear.pack import can_pack, has_fast_bf16, pack_linears, panel_linears
from outrider.models.linear.panel import Kernels
from outrider.models.lm import LM, LMShape, PassLimits, module_run
from outrider.models.loading import hub
from outrider.models.loading.adapter import about_base
from outrider.models.loading.checked_files import (
    check_config,
    check_json,
    check_tokenizer,
    check_tokenizer_files,
)
from outrider.models.loading.context import context_length, hold_positions, reaches, sliding_window
from outrider.models.loading.multimodal import auto_classes, loaded, text_part
from outrider.models.loading.older_code import hand_over
from outrider.models.loading.unsupported import (
    OwnCacheNeededError,
    refuse_other_caches,
    refuse_other_heads,
    refuse_other_writers,
    refuse_unknown_kinds,
    refuse_untrusted,
)
from outrider.models.probes.pass_limits import find_pass_limits
from outrider.models.probes.probe import AttentionCall, check_against_plain, find_layers
from outrider.models.quantised import checkpoint
from outrider.models.quantised.load import quantised_module
from outrider.models.quantised.scheme import scheme_of
from outrider.models.source import ModelSource
from outrider.models.stateful.check import LIMITS, check_own_cache
from outrider.models.stateful.lm import UNKNOWN_LAYER, StateLM
from outrider.models.stateful.run import OwnCacheRun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}


def resolve_device(device: str) -> torch.device:
    """'auto' means CUDA where there is one. With its number, as tensors say it: "cuda" and "cuda:0"
    are not equal to torch.

    Raises ConfigError on a device torch does not know, CapabilityError on one it does not have or
    that we cannot use: Apple's has no fp64, in which sampling sums, and no other was ever tried.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device '{device}'. Use auto, cpu, cuda or cuda:N.") from error
    if resolved.type not in ("cpu", "cuda"):
        raise CapabilityError(f"device '{device}' is not supported. Use auto, cpu, cuda or cuda:N.")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise CapabilityError(
            f"device '{device}' was asked for, but this torch sees no CUDA device. Use cpu or auto."
        )
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise CapabilityError(
            f"device '{device}' was asked for, but the last CUDA device here is cuda:{last}."
        )
    if device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


def resolve_dtype(
    dtype: str, config: Any, device: torch.device, *, ours: bool = True, rounded: bool = False
) -> torch.dtype:
    """'auto' is the checkpoint's own dtype; on a CPU that is slow in it float32, which contains it
    exactly. That is so with float16, and with bfloat16 where neither oneDNN has it nor our kernels,
    if they will be used (`ours`): torch multiplies number by number then. Weights that stay
    integers run in bfloat16 there, the type that kernels for them have, as do weights that loading
    rounds (`rounded`)."""
    if dtype == "auto":
        in_integers = device.type == "cpu" and (rounded or scheme_of(config, device) is not None)
        declared = torch.bfloat16 if in_integers else own_dtype(config)
        return torch.float32 if device.type == "cpu" and not _is_fast(declared, ours) else declared
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'.{did_you_mean(dtype, ['auto', *DTYPES])}")
    return DTYPES[dtype]


def _is_fast(dtype: torch.dtype, ours: bool) -> bool:
    if dtype == torch.bfloat16:
        return has_fast_bf16() or (ours and of_this_cpu() is not None)
    return dtype != torch.float16


def own_dtype(config: Any) -> torch.dtype:
    """The dtype of the checkpoint's weights, which some multimodal configs name for the text alone
    (Qwen3-VL, Qwen3.5)."""
    return (
        getattr(config, "dtype", None)
        or getattr(config.get_text_config(), "dtype", None)
        or torch.float32
    )


def load_config(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """The model's config. Raises CheckpointError when there is none, CapabilityError when it is no
    decoder."""
    if source.base is not None and source.adapter is not None:
        try:
            return load_config(source.base, trust_remote_code)
        except CheckpointError as error:
            raise about_base(source.adapter, error) from error
    name = source.name
    revision = source.revision
    if source.gguf is not None:
        return _decoder(name, gguf_config(source.gguf))
    path = Path(name)
    # a hub id is USER/NAME
    looks_local = path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if path.is_file():
        raise CheckpointError(
            f"'{name}' is a file, and no GGUF file. Give a .gguf file, or a folder with "
            "config.json."
        )
    if looks_local and not path.is_dir():
        raise CheckpointError(
            f"no model folder at '{name}'.{near_path(path)} Give a folder with config.json, a "
            ".gguf file, a hub id, or 'demo'."
        )
    if looks_local and not (path / "config.json").exists():
        raise CheckpointError(
            f"'{name}' has no config.json, so it is no transformers checkpoint. Give a folder "
            "that has one."
        )
    offline = hub.only_cached(name)
    try:
        check_json(name, "config.json", revision, offline)
        config = transformers.AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, revision=revision, local_files_only=offline
        )
    except OutriderError:
        raise
    except Exception as error:
        if offline and hub.is_absent(error):
            raise CheckpointError(hub.not_found(name)) from error
        refuse_untrusted(name, "model", error)
        refuse_unknown_kinds(name, error)
        raise CheckpointError(f"cannot read the config of '{name}': {first_line(error)}") from error
    check_config(name, config)
    return _decoder(name, config)


def _decoder(name: str, config: Any) -> Any:
    refuse_other_heads(name, config)
    checkpoint.name_quantisation(config)
    # of Qwen Omni, whose whole checkpoint also speaks
    writing = getattr(config, "thinker_config", None)
    if writing is None:
        return config
    writing.name_or_path = config.name_or_path
    return writing


def load_tokenizer(source: ModelSource, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises CheckpointError when the checkpoint has none."""
    files = source.with_tokenizer
    if files.gguf is not None:
        return gguf_tokenizer(files.gguf)
    name = files.name
    revision = files.revision
    offline = hub.only_cached(name)
    try:
        check_tokenizer_files(name, revision, offline)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, revision=revision, local_files_only=offline
        )
        if getattr(tokenizer, "chat_template", None) is None and (
            template := hub.template_of_processor(name, revision, offline)
        ):
            tokenizer.chat_template = template
        check_tokenizer(tokenizer)
        return tokenizer
    except OutriderError:
        raise
    except Exception as error:
        if offline and hub.is_absent(error):
            raise CheckpointError(hub.not_found(name)) from error
        refuse_untrusted(name, "tokenizer", error)
        raise CheckpointError(
            f"'{name}' has no usable tokenizer ({first_line(error)}). "
            "Put tokenizer.json and tokenizer_config.json next to config.json."
        ) from error


def load_module(
    source: ModelSource,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    pack: Packer = by_torch,
) -> nn.Module:
    """The weights in transformers' own module. Raises CheckpointError when they are missing,
    damaged or incomplete.

    `config`: it says what an adapter makes of the embeddings, too, once this returns."""
    if source.base is not None and source.adapter is not None:
        base = load_module(source.base, config, dtype, device, trust_remote_code, pack)
        return source.adapter.merged_into(base, config)
    if source.gguf is not None:
        made = gguf_module(source.gguf, config, dtype, experts_stay=device.type == "cpu", pack=pack)
        return made.eval().requires_grad_(False).to(device)
    name = source.name
    revision = source.revision
    if (scheme := scheme_of(config, device)) is not None:
        return text_part(
            quantised_module(source, config, dtype, scheme).eval().requires_grad_(False)
        ).to(device)
    widened = checkpoint.is_widened(config, device)
    checkpoint.widen_on_cpu(config, device)
    hf_logging = transformers.utils.logging
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # callers have a status line of their own
    try:
        for kind in auto_classes(config):
            module, report = loaded(
                kind,
                name,
                config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                revision=revision,
                # sizes are refused below, by name
                ignore_mismatched_sizes=True,
                local_files_only=hub.only_cached(name),
            )
            if not (absent := _absent(report)):
                break
    except OutriderError:
        raise
    except Exception as error:
        refuse_untrusted(name, "model", error)
        how = checkpoint.how_quantised(config)
        raise CheckpointError(
            f"cannot load the weights of '{name}'{how}: {first_line(error)}"
        ) from error
    finally:
        if bars:
            hf_logging.enable_progress_bar()
    checkpoint.refuse_unused_scales(name, config, report["unexpected_keys"])
    if absent:
        raise CheckpointError(
            f"'{name}' lacks {len(absent)} weights, first '{sorted(absent)[0]}': incomplete "
            "checkpoint."
        )
    if mismatched := sorted(report.get("mismatched_keys") or ()):
        key, actual, wanted = mismatched[0]
        raise CheckpointError(
            f"'{name}': {len(mismatched)} weights of another shape than config.json says, first "
            f"'{key}': {tuple(actual)} in the "
            f"file, {tuple(wanted)} by the config. Weights and config.json are of different models."
        )
    if widened:
        checkpoint.to_one_dtype(module, dtype)
    elif (
        method := checkpoint.quantisation_of(module.config)
    ) and module.get_input_embeddings().weight.dtype != dtype:
        runs, asked = (
            str(each).removeprefix("torch.")
            for each in (module.get_input_embeddings().weight.dtype, dtype)
        )
        raise CapabilityError(
            f"'{name}' is quantised ({method}) and runs in {runs}, not in {asked}. Use --dtype "
            f"{runs}."
        )
    return text_part(module.eval().requires_grad_(False)).to(device)


def _absent(report: Mapping[str, Any]) -> list[str]:
    """Weights that loading did not find, but for those that are made."""
    return [
        key
        for key in report["missing_keys"]
        if not key.endswith(("rotary_emb.inv_freq", ".attn.bias"))
    ]


def build_lm(
    module: Any,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    known: LMShape | None = None,
    kernels: Kernels | None = None,
) -> LM:
    """An `LM` around a module, its logits checked against the module's own; a `StateLM`, unchecked,
    where our cache cannot serve. Not yet packed.

    `known`: what an earlier check of the same model found, which is not made again. `kernels`: for
    weights in blocks, which each pass would widen without. Raises CapabilityError for a model that
    continues no text.
    """
    attention.register()
    refuse_other_writers(module, name)
    hand_over(module)
    hold_positions(module)
    if kernels is not None and any(True for _ in block_layers(module)):
        kernels(module)
    if known is not None:
        module.set_attn_implementation(attention.NAME)
        return LM(module_run(module), known, dtype, device)
    own_attention = module.config._attn_implementation
    try:
        refuse_other_caches(module, device)
        return _on_our_cache(module, name, dtype, device)
    except OwnCacheNeededError as error:
        module.set_attn_implementation(own_attention)
        return StateLM(
            OwnCacheRun(module),
            _shape_of(module, (), device),
            dtype,
            device,
            name=name,
            why=str(error),
        )


def _on_our_cache(module: Any, name: str, dtype: torch.dtype, device: torch.device) -> LM:
    """The model on our cache. Raises OwnCacheNeededError where our cache cannot serve the model."""
    config = module.config.get_text_config()
    layers = find_layers(module, config.num_hidden_layers)
    if len(windows := sorted({layer.window for layer in layers if layer.window})) > 1:
        raise OwnCacheNeededError(
            f"its layers have windows of different sizes ({windows}), and our passes have one "
            "mask for all"
        )
    lm = LM(module_run(module), _shape_of(module, layers, device), dtype, device)
    check_against_plain(lm, module, name, config.vocab_size)
    return lm


def _num_outputs(layer: Any) -> int:
    """How many outputs a linear layer has, found without a weight that would be widened to be
    looked at."""
    return int(layer.out_features) if hasattr(layer, "out_features") else layer.weight.shape[0]


def _shape_of(module: Any, layers: Sequence[AttentionCall], device: torch.device) -> LMShape:
    """`layers`: what our attention saw of them; none for a model on transformers' own cache, which
    knows shapes and windows."""
    config = module.config.get_text_config()
    outputs = _num_outputs(module.get_output_embeddings())
    shapes = (*(layer.kept(device) for layer in layers), *indexer_layers(module)) if layers else ()
    return LMShape(
        # Inkling cuts its logits off
        vocab_size=min(outputs, getattr(config, "unpadded_vocab_size", None) or outputs),
        context_length=min([context_length(config), *reaches(config, layers)]),
        layers=shapes or (UNKNOWN_LAYER,) * getattr(config, "num_hidden_layers", 1),
        sliding_window=next(
            (layer.window for layer in layers if layer.window), sliding_window(config)
        ),
        num_parameters=sum(p.numel() for p in module.parameters())
        + sum(layer.num_weights for layer in block_layers(module)),
    )


def finish(
    lm: LM,
    module: nn.Module,
    *,
    pack: bool = True,
    kernels: Kernels | None = None,
    limits: PassLimits | None = None,
) -> None:
    """The fast eager path on a CPU, then the pass limits measured on it.

    Linears are packed for oneDNN; where it has none of this dtype, or weights are in blocks,
    `kernels` put them on our library. `limits`: what an earlier start measured. Raises
    CapabilityError for a model that transformers' own cache does not serve, either.
    """
    if isinstance(lm, StateLM):
        check_own_cache(lm)
    in_blocks = kernels is not None and any(True for _ in block_layers(module))
    if pack and not in_blocks and can_pack(lm.device, lm.dtype):
        pack_linears(module)
    elif pack and kernels is not None:
        panel_linears(module)
        lm.kernels = kernels(module)
    if isinstance(lm, StateLM):
        lm.limits = LIMITS
    else:
        lm.limits = find_pass_limits(lm, module) if limits is None else limits
