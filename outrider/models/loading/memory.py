"""How much memory a model will need, against what is there: known before a single weight is read.

Weights are counted from the headers of the safetensors files (which also shows a truncated file at
once), or from the config where there are no files yet. Keys and values cost `layers x KV heads x
head size x 2 x bytes per number` for each token. A draft model has a share of both, and so have
trained heads. On CPU the weights exist twice while a first start packs them (`copies`); later ones
pack mapped files. Activations, the interpreter and torch itself are not counted: a few hundred
megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from outrider.errors import CapabilityError, CheckpointError
from outrider.lazy import transformers
from outrider.models.gguf.weights import gguf_bytes
from outrider.models.loaded import ModelMemory
from outrider.models.loading.context import configured_context
from outrider.models.loading.multimodal import auto_classes
from outrider.models.loading.weight_files import check_sizes, safetensors_header, weight_files
from outrider.models.quantised.checkpoint import bits_per_weight, is_widened, quantisation_of
from outrider.models.quantised.scheme import scheme_of
from outrider.models.source import ModelSource

GIB = 1 << 30
CPU = torch.device("cpu")
# the package of a checkpoint's own code, which keeps latents as heads
OWN_CODE = "transformers_modules"
# the version of transformers whose own cache does so where an indexer picks keys
KEEPS_HEADS = "5.17."
PACKED_COPIES = 2.0  # weights as loaded, and packed for the kernels
# room asked for when nobody names a length: the cache only grows as it is used
DEFAULT_TOKENS = 4096
# in values of a config's `layer_types`
WITHOUT_KEYS = ("linear_attention", "mamba", "conv", "recurrent", "moe", "mlp")
FLOATS = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
}  # loaded as the dtype asked for; anything else keeps its size, unless it is widened
FLOATS_8 = ("F8_E4M3", "F8_E5M2")
# endings of what goes with quantised tensors
SCALES = ("_scale", "_scales", "_scale_inv", "_zero_point", "_shape", "_g_idx")
CGROUP = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


@dataclass(frozen=True)
class MemoryReport:
    """The memory that is needed, and that there is."""

    target: ModelMemory
    draft: ModelMemory | None
    num_rows: int
    num_tokens: int  # per row
    copies: float  # of the weights, at the worst moment
    device: str
    available_bytes: int
    heads: tuple[ModelMemory, ...] = ()  # trained heads that draft

    @property
    def drafts(self) -> list[ModelMemory]:
        """All that is there to draft: the draft model and the heads."""
        return [*([] if self.draft is None else [self.draft]), *self.heads]

    @property
    def models(self) -> list[ModelMemory]:
        return [self.target, *self.drafts]

    @property
    def weights_bytes(self) -> int:
        """Bytes of the target's weights, all copies."""
        return self.target.held_bytes(self.copies)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the target's cache, for all rows at full length."""
        return self.target.kv_bytes_per_token * self.num_rows * self.num_tokens

    @property
    def draft_bytes(self) -> int:
        """Weights and KV of the draft model and of heads."""
        kv = (
            sum(draft.kv_bytes_per_token for draft in self.drafts) * self.num_rows * self.num_tokens
        )
        return sum(draft.held_bytes(self.copies) for draft in self.drafts) + kv

    @property
    def needed_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.draft_bytes

    @property
    def fitting_tokens(self) -> int:
        """Longest rows whose KV fits alongside the weights."""
        per_token = sum(model.kv_bytes_per_token for model in self.models) * self.num_rows
        free = self.available_bytes - sum(model.held_bytes(self.copies) for model in self.models)
        return max(0, free // per_token) if per_token else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON: the fields and the sums."""
        derived = ("weights_bytes", "kv_bytes", "draft_bytes", "needed_bytes", "fitting_tokens")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def one_line(self) -> str:
        """For a person, before loading starts."""
        draft = self._drafts_share()
        weights = _size(self.weights_bytes) if self.target.weights_bytes else "unknown"
        per_token = sum(model.kv_bytes_per_token for model in self.models)
        return (
            f"memory: about {_size(self.needed_bytes)} needed "
            f"(weights {weights} + KV {_size(self.kv_bytes)} for {self.num_rows} x {self.num_tokens} tokens, "
            f"{_size(per_token)} each{draft}), "
            f"{_size(self.available_bytes)} available on {self.device}"
        )

    def check(self) -> None:
        """Raises CapabilityError when it does not fit, saying what would."""
        if self.needed_bytes <= self.available_bytes:
            return
        draft = self._drafts_share()
        raise CapabilityError(
            f"not enough memory on {self.device}: '{self.target.name}' needs "
            f"{_size(self.needed_bytes)} "
            f"(weights {_size(self.weights_bytes)} + KV {_size(self.kv_bytes)} for "
            f"{self.num_rows} x "
            f"{self.num_tokens} tokens{draft}), {_size(self.available_bytes)} available; "
            f"try {self._advice()}."
        )

    def _drafts_share(self) -> str:
        return f" + draft {_size(self.draft_bytes)}" if self.drafts else ""

    def _advice(self) -> str:
        if self.fitting_tokens >= 16:
            return f"--max-model-len {self.fitting_tokens}"
        if self.drafts and self.needed_bytes - self.draft_bytes <= self.available_bytes:
            return "--drafter ngram, which needs no weights of its own"
        return "a smaller model, --dtype bfloat16 if it is larger, or a machine with more memory"


def estimate_memory(
    sources: Sequence[ModelSource],
    configs: Sequence[Any],
    *,
    heads: Sequence[ModelMemory] = (),
    dtype: torch.dtype,
    device: torch.device,
    num_rows: int = 1,
    num_tokens: int | None = None,
    packed: bool = False,
    available_bytes: int | None = None,
    rounding: Sequence[int] | None = None,
    called: Sequence[str] | None = None,
) -> MemoryReport:
    """Weigh the target and, as second source, its draft; `heads` alongside them. Raises
    CapabilityError when they do not fit.

    `called`: what the report calls the models; None: by their names. `num_tokens` None: up to 4096
    a row, since the cache grows only as it is used. Raises CheckpointError on damaged files.
    `rounding`: bytes that rounding the target's linear layers frees and takes (`rounded_bytes`).
    """
    models = [
        model_memory(source, config, dtype, device)
        for source, config in zip(sources, configs, strict=True)
    ]
    if called is not None:
        models = [replace(model, name=label) for model, label in zip(models, called, strict=True)]
    if rounding is not None:
        models[0] = rounded_memory(models[0], *rounding)
    return memory_report(
        models,
        configured_context(configs[0]),
        heads=heads,
        device=device,
        num_rows=num_rows,
        num_tokens=num_tokens,
        copies=PACKED_COPIES if packed else 1.0,
        available_bytes=available_bytes,
    )


def memory_report(
    models: Sequence[ModelMemory],
    context: int,
    *,
    heads: Sequence[ModelMemory] = (),
    device: torch.device,
    num_rows: int = 1,
    num_tokens: int | None = None,
    copies: float = 1.0,
    available_bytes: int | None = None,
) -> MemoryReport:
    """Compare the memory that the target and, as second, its draft need with the memory there is.
    Raises CapabilityError when they do not fit.

    `context`: tokens that the target holds; `copies`: how many times plain weights are in memory.
    The others as for `estimate_memory`.
    """
    report = MemoryReport(
        target=models[0],
        draft=models[1] if len(models) > 1 else None,
        num_rows=num_rows,
        num_tokens=min(num_tokens or DEFAULT_TOKENS, context),
        copies=copies,
        device=str(device),
        available_bytes=available_memory(device) if available_bytes is None else available_bytes,
        heads=tuple(heads),
    )
    report.check()
    return report


def model_memory(
    source: ModelSource, config: Any, dtype: torch.dtype, device: torch.device = CPU
) -> ModelMemory:
    """One model's weights and KV per token."""
    widened = is_widened(config, device)
    folder = Path(source.weights.name).expanduser()
    if source.gguf is not None:
        plain, quantised = gguf_bytes(source.gguf, config, dtype, experts_stay=device.type == "cpu")
    elif folder.is_dir():
        plain, quantised = _folder_bytes(folder, dtype, config, widened=widened)
    else:
        stays = quantisation_of(config) is not None and not widened
        plain = 0 if stays else config_weights_bytes(config, dtype)
        quantised = 0
    plain += 0 if source.adapter is None else source.adapter.merging_bytes(config, dtype)
    return ModelMemory(
        source.name, plain + quantised, kv_bytes_per_token(config, dtype, device), quantised
    )


def rounded_memory(plain: ModelMemory, freed: int, blocks: int) -> ModelMemory:
    """A model whose linear layers loading rounds: both forms are there for a moment."""
    if plain.weights_bytes <= freed:  # not known
        return plain
    return replace(
        plain,
        weights_bytes=plain.weights_bytes - freed + blocks,
        quantised_bytes=blocks,
        loading_bytes=plain.weights_bytes + blocks,
    )


def head_memory(
    name: str, head: nn.Module, kv_numbers_per_token: int, dtype: torch.dtype
) -> ModelMemory:
    """A trained head's part, once loaded as `dtype`; its tensors may be on torch's meta device.
    `kv_numbers_per_token`: keys and values of one token over its layers."""
    numbers = sum(parameter.numel() for parameter in head.parameters())
    return ModelMemory(name, numbers * dtype.itemsize, kv_numbers_per_token * dtype.itemsize)


def kv_bytes_per_token(config: Any, dtype: torch.dtype, device: torch.device = CPU) -> int:
    """Keys and values of one token over all layers; 0 for a model without attention heads (refused
    when it is loaded).

    Raises CheckpointError for a config without layers.
    """
    text = config.get_text_config()
    expands = (
        quantisation_of(config) is not None
        and not is_widened(config, device)
        and scheme_of(config, device) is None
    )
    num_layers = getattr(text, "num_hidden_layers", None) or 0
    if num_layers < 1 and getattr(text, "num_attention_heads", None):
        raise CheckpointError(
            f"config.json says num_hidden_layers {num_layers}; a model has at least one layer."
        )
    # layers of several shapes (Gemma 4): the config answers for each alone
    if getattr(text, "is_heterogeneous", False):
        numbers = sum(
            _kv_numbers(text.per_layer_config[layer], expands=expands)
            for layer in range(num_layers)
        )
    else:
        numbers = _num_with_keys(text, num_layers) * _kv_numbers(
            text, expands=expands, ours=device.type == "cpu"
        )
        numbers -= (
            (getattr(text, "indexer_types", None) or []).count("shared") * text.index_head_dim
            if _has_indexer(text)
            else 0
        )
    return int(numbers * dtype.itemsize)


def layer_kv_bytes(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token in one layer: of several shapes, the first one's."""
    text = config.get_text_config()
    layer = text.per_layer_config[0] if getattr(text, "is_heterogeneous", False) else text
    return _kv_numbers(layer, ours=False) * dtype.itemsize


def _num_with_keys(text: Any, num_layers: int) -> int:
    """Layers that keep keys and values of every token: not those with a running state, nor those
    without attention."""
    kinds = getattr(text, "layer_types", None) or ()
    return num_layers - sum(
        any(each in kind for each in WITHOUT_KEYS) for kind in kinds[:num_layers]
    )


def _has_indexer(layer: Any) -> bool:
    return bool(getattr(layer, "index_topk", None))


def _kv_numbers(layer: Any, *, expands: bool = False, ours: bool = True) -> int:
    """Numbers in the key and value of one token in a layer of this config. `expands`: its weights
    stay quantised in transformers' code, so latents are kept as heads (`latent.py`). `ours`: our
    cache keeps an indexer's keys."""
    heads = getattr(layer, "num_attention_heads", None)
    if not heads:
        return 0
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    # `models/latent.py`
    if (rank := getattr(layer, "kv_lora_rank", None)) and getattr(layer, "v_head_dim", None):
        picked = layer.index_head_dim if _has_indexer(layer) else 0  # an indexer's key
        if picked and not ours:
            expands = transformers.__version__.startswith(KEEPS_HEADS)
        if expands or type(layer).__module__.startswith(OWN_CODE):
            return int(
                heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim + layer.v_head_dim)
                + picked
            )
        return int(rank + layer.qk_rope_head_dim + picked)
    head_size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return int(kv_heads * head_size * 2)


def folder_weights_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of the weights in a checkpoint folder once loaded as `dtype`, from the files' headers
    alone."""
    return sum(_folder_bytes(folder, dtype, None, widened=False))


def _folder_bytes(
    folder: Path, dtype: torch.dtype, config: Any, *, widened: bool
) -> tuple[int, int]:
    """Bytes of a checkpoint folder's weights once loaded: of plain ones, and of quantised ones that
    stay as they are stored."""
    files = weight_files(folder)
    if files[0].suffix != ".safetensors":
        stored = sum(file.stat().st_size for file in files)
        return stored * dtype.itemsize // (getattr(config, "dtype", None) or dtype).itemsize, 0
    tensors = {name: entry for file in files for name, entry in safetensors_header(file).items()}
    if config is not None:
        check_sizes(folder, tensors, config.get_text_config())
    if config is not None and getattr(config.get_text_config(), "tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)  # loaded once, though some checkpoints store it twice
    if widened:
        bits = bits_per_weight(config)
        return sum(_widened_bytes(name, entry, bits, dtype) for name, entry in tensors.items()), 0
    sizes = [(_loaded_bytes(entry, dtype), entry["dtype"] in FLOATS) for entry in tensors.values()]
    return sum(size for size, is_float in sizes if is_float), sum(
        size for size, is_float in sizes if not is_float
    )


def config_weights_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights a config describes, by building it without storage; 0 when that fails."""
    try:
        with torch.device("meta"):
            model = auto_classes(config)[0].from_config(config)
    except Exception:  # noqa: BLE001  an estimate must not be the reason to refuse; loading will name the cause
        return 0
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


def available_memory(device: torch.device) -> int:
    """Free bytes: of the CUDA device, or of this machine within its container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([psutil.virtual_memory().available, *_container_rooms()])


def _container_rooms() -> list[int]:
    rooms = []
    for limit, used in CGROUP:
        try:
            rooms.append(int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # no such control group, or "max": no limit
            continue
    return rooms


def _loaded_bytes(entry: dict[str, Any], dtype: torch.dtype) -> int:
    start, end = entry["data_offsets"]
    stored = FLOATS.get(entry["dtype"])
    return end - start if stored is None else (end - start) // stored * dtype.itemsize


def _widened_bytes(name: str, entry: dict[str, Any], bits: int, dtype: torch.dtype) -> int:
    """Bytes of one tensor of a quantised checkpoint as plain numbers; scales are used up on the
    way."""
    start, end = entry["data_offsets"]
    if name.endswith(SCALES):
        return 0
    if entry["dtype"] in FLOATS_8 or (entry["dtype"] == "I8" and name.endswith(".weight")):
        return (end - start) * dtype.itemsize
    if name.endswith(("_blocks", "_packed")) or entry["dtype"] == "U8":
        return (end - start) * 8 // bits * dtype.itemsize
    return _loaded_bytes(entry, dtype)


def _size(num_bytes: float) -> str:
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:.1f} GiB"
    return (
        f"{num_bytes / (1 << 20):.1f} MiB"
        if num_bytes >= 1 << 20
        else f"{num_bytes / 1024:.1f} KiB"
    )
