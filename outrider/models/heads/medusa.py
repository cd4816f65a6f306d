"""Medusa heads: each guesses one of the next tokens from one hidden state of the target (Cai et al.
2401.10774).

    feature f_t: what the target's output head reads at position t, whose distribution is that of x_{t+1}
    head i:      distribution of x_{t+2+i}, i = 0, 1, ...   =   softmax(W_i (f + SiLU(B f + b)))

Every head has its own residual blocks. The output layer is the head's own (V x H numbers each, as
published) or the target's for all heads (`own_output=False`), which is free where V is large. The
vocabulary may be reduced: then `token_ids` says which of the target's tokens a head knows.

Two published layouts are read and written. Heads are counted in the file: configs on the hub say 2
where 5 are stored. Ours is the original layout as safetensors, with what it has no word for under
"outrider" in config.json.

    original    {head}.{block}.linear.weight, .bias    {head}.{blocks}.weight     Medusa's medusa_lm_head.pt, also safetensors
    vllm        blocks.{head}.layers.{block}.weight    lm_heads.{head}.weight     vLLM's MedusaModel; token_map for a reduced
                                                                                  vocabulary
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import CheckpointError, ConfigError, did_you_mean
from outrider.models.derived.derive import weight_of
from outrider.models.heads.names import Names
from outrider.models.heads.source import HeadSource, write_head
from outrider.models.tokens.vocabulary import OUTSIDE

KIND = "Medusa heads"
PREFIXES = (
    ("medusa_heads.{rest}", "{rest}"),
    ("medusa_head.{rest}", "{rest}"),
    ("model.{rest}", "{rest}"),
)
VLLM = Names(
    ("blocks.{head}.layers.{layer}.{rest}", "heads.{head}.layers.{layer}.{rest}"),
    ("lm_heads.{head}.weight", "heads.{head}.output.weight"),
    ("token_map", "token_ids"),
    aliases=PREFIXES,
)


@dataclass(frozen=True)
class MedusaConfig:
    """Shapes of the heads, and what they know about themselves."""

    hidden_size: int
    vocab_size: int  # the target's
    num_heads: int
    num_layers: int = 1  # residual blocks of each head
    bias: bool = True  # in the residual blocks
    own_output: bool = True  # each head has its own output layer
    draft_vocab_size: int | None = None  # tokens a head knows; None: all
    logit_scale: float = 1.0
    trained_for: str = ""  # name of the target
    # [head][rank]: how often its rank-th guess was right; () = not measured
    accuracies: tuple[tuple[float, ...], ...] = ()


class ResidualHead(nn.Module):
    """The residual blocks of one head, and its output layer where it has one of its own."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(
            nn.Linear(size, size, bias=config.bias) for _ in range(config.num_layers)
        )
        num_tokens = config.draft_vocab_size or config.vocab_size
        self.output = nn.Linear(size, num_tokens, bias=False) if config.own_output else None

    def forward(self, features: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        for layer in self.layers:
            features = features + F.silu(layer(features))
        return features


class MedusaHeads(nn.Module):
    """All heads. Without own output layers, `bind` must give them the target's before the first
    pass.

    `run`: in place of the modules' own passes; features (N, H) -> logits (N, heads, draft
    vocabulary).
    """

    run: Callable[[Tensor], Tensor] | None = None
    # (draft vocabulary,) int64: the target's id of every token the heads know; None: all
    token_ids: Tensor | None
    _like: Tensor

    def __init__(self, config: MedusaConfig, token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(ResidualHead(config) for _ in range(config.num_heads))
        self.register_buffer("token_ids", token_ids, persistent=False)
        # of the heads' dtype, even when linears are packed
        self.register_buffer("_like", torch.empty(0), persistent=False)
        # not a child: the target's weights are not the head's to save
        self.__dict__["_target_output"] = None

    @classmethod
    def new(cls, config: MedusaConfig, target: Any) -> MedusaHeads:
        """Untrained heads of a transformers module: blocks that change nothing, output layers that
        are copies of its own. So every head begins with the target's distribution of the token
        before the one it should guess."""
        heads = cls(config)
        weight = target.get_output_embeddings().weight
        with torch.no_grad():
            for head in heads.parts:
                for layer in head.layers:
                    nn.init.zeros_(layer.weight)
                    if layer.bias is not None:
                        nn.init.zeros_(layer.bias)
                if head.output is not None:
                    head.output.weight.copy_(weight)
        heads.bind(target.get_output_embeddings())
        return heads.to(weight.device)

    def bind(self, output: nn.Module) -> None:
        """Read logits through the target's output layer, where the heads have none of their own."""
        if not self.config.own_output:
            self.__dict__["_target_output"] = output

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def target_output(self) -> nn.Module | None:
        """The target's output layer, where the heads have none of their own and are bound."""
        return self.__dict__["_target_output"]

    @property
    def parts(self) -> list[Any]:
        """The heads, as what they are."""
        return list(self.heads)

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    def output_weight(self, head: int) -> Tensor:
        """(V, H): of one head's output layer, its own or the target's."""
        output = self.parts[head].output
        return weight_of(self.__dict__["_target_output"] if output is None else output)

    def forward(self, features: Tensor, num_heads: int | None = None) -> Tensor:
        """Features (..., H) -> logits (..., heads, V), of all heads or of the first few."""
        states = features.to(self.dtype)  # in training the heads are fp32, whatever the target is
        if self.run is not None:
            logits = self.run(states.reshape(-1, states.shape[-1])).unflatten(0, states.shape[:-1])[
                ..., :num_heads, :
            ]
        else:
            logits = torch.stack(
                [self._logits(head, states, features.dtype) for head in self.parts[:num_heads]],
                dim=-2,
            )
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self.token_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), OUTSIDE)
        return full.index_copy(-1, self.token_ids, logits)

    def _logits(self, head: Any, features: Tensor, target_dtype: torch.dtype) -> Tensor:
        if head.output is not None:
            return head.output(head(features))
        output = self.__dict__["_target_output"]
        assert output is not None, "heads without output layers: bind() them to a target"
        return output(head(features).to(target_dtype)).to(features.dtype)


# ---------------------------------------------------------------- files


def original(num_layers: int) -> Names:
    """The names of the original layout, for heads of this many residual blocks."""
    return Names(
        ("{head}.{layer}.linear.{rest}", "heads.{head}.layers.{layer}.{rest}"),
        (f"{{head}}.{num_layers}.weight", "heads.{head}.output.weight"),
        aliases=PREFIXES,
    )


def load_medusa(
    folder: Path | str, hidden_size: int, vocab_size: int, *, outline: bool = False
) -> MedusaHeads:
    """Heads for a target with these sizes, still to be bound to it; an outline has no weights
    (torch's meta device).

    Raises CheckpointError when they do not fit the target.
    """
    source = HeadSource.open(folder, outline=outline)
    names = list(source.names)
    blocks = [
        int(match[1])
        for name in names
        if (match := re.search(r"(?:^|\.)\d+\.(\d+)\.linear\.", name))
    ]
    is_original = any(re.match(r"(medusa_heads?\.|model\.)?\d+\.\d+\.", name) for name in names)
    source.rename(original(1 + max(blocks, default=-1)) if is_original else VLLM)
    num_heads = _count(source, r"heads\.(\d+)\.")
    num_layers = _count(source, r"heads\.\d+\.layers\.(\d+)\.")
    if not num_heads:
        raise CheckpointError(
            f"{source.what()} holds no {KIND}: it has {', '.join(sorted(names)[:6])}"
        )
    settings = source.config.get("outrider") or {}
    with source.making(KIND):
        ids = _token_ids(source, vocab_size)
        has_outputs = "heads.0.output.weight" in source or settings.get("output") != "target"
        config = MedusaConfig(
            hidden_size,
            vocab_size,
            num_heads,
            num_layers,
            bias="heads.0.layers.0.bias" in source,
            own_output=has_outputs,
            draft_vocab_size=None if ids is None else len(ids),
            trained_for=source.trained_for,
            logit_scale=1.0 if is_original else float(source.config.get("logit_scale", 1.0)),
            accuracies=tuple(
                tuple(float(value) for value in line) for line in settings.get("accuracies", ())
            ),
        )
        with torch.device(source.device):
            heads = MedusaHeads(config, ids)
    return source.fill(heads, KIND, {} if is_original else _outputs(source, config, ids))


def _count(source: HeadSource, pattern: str) -> int:
    return len({match[1] for name in source.names if (match := re.match(pattern, name))})


def _token_ids(source: HeadSource, vocab_size: int) -> Tensor | None:
    """The target's ids of the tokens that the heads know; None: all."""
    if "token_ids" not in source:
        return None
    ids = source.take("token_ids", *source.shape("token_ids")[:1]).long()
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise CheckpointError(
            f"{source.what()}: token_map names token {int(ids.max())}, the target has "
            f"{vocab_size} tokens"
        )
    return ids


def _outputs(source: HeadSource, config: MedusaConfig, ids: Tensor | None) -> dict[str, Tensor]:
    """vLLM's output layers: one for all heads or one each, whole or cut to the rows that the map
    names already."""
    is_shared = bool(source.config.get("original_lm_head")) or "heads.1.output.weight" not in source
    rows = config.draft_vocab_size or config.vocab_size
    outputs = list[Tensor]()
    for head in range(1 if is_shared else config.num_heads):
        stored = source.shape(f"heads.{head}.output.weight")[0]
        weight = source.take(
            f"heads.{head}.output.weight",
            stored if stored == config.vocab_size else rows,
            config.hidden_size,
        )
        outputs.append(weight if ids is None or stored == rows else weight[ids])
    return {
        f"heads.{head}.output.weight": outputs[0 if is_shared else head]
        for head in range(config.num_heads)
    }


def save_medusa(heads: MedusaHeads, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Our layout: the original one (vLLM's for a reduced vocabulary); weights as they are, or in
    `dtype`. Raises OSError when the disk is full."""
    if heads.token_ids is not None:
        return write_head(
            folder, "model.safetensors", _vllm_config(heads), _vllm_tensors(heads), dtype
        )
    tensors = _original_tensors(heads, heads.config.own_output)
    write_head(folder, "medusa_lm_head.safetensors", _original_config(heads), tensors, dtype)


def export_medusa(heads: MedusaHeads, folder: Path, layout: str) -> None:
    """The heads as other engines read them: "original" (medusa_lm_head.pt) or "vllm". Output layers
    that are the target's are written out. Raises ConfigError for another layout, or heads with a
    reduced vocabulary in the original one."""
    if layout == "vllm":
        write_head(folder, "model.safetensors", _vllm_config(heads), _vllm_tensors(heads))
    elif layout == "original":
        if heads.token_ids is not None:
            raise ConfigError(
                "the original Medusa layout has no reduced vocabulary; export these heads as 'vllm'"
            )
        write_head(
            folder,
            "medusa_lm_head.safetensors",
            _original_config(heads),
            _original_tensors(heads, True),
        )
        torch.save(_original_tensors(heads, True), folder / "medusa_lm_head.pt")
    else:
        raise ConfigError(
            f"unknown layout '{layout}' of {KIND}.{did_you_mean(layout, ['original', 'vllm'])}"
        )


def _original_tensors(heads: MedusaHeads, outputs: bool) -> dict[str, Tensor]:
    """By the names of the original layout; `outputs`: with the output layers."""
    tensors = dict[str, Tensor]()
    names = original(heads.config.num_layers)
    for index, head in enumerate(heads.parts):
        layers = {
            f"heads.{index}.layers.{name}": tensor
            for name, tensor in head.layers.state_dict().items()
        }
        tensors |= {names.theirs(name): tensor for name, tensor in layers.items()}
        if outputs:
            tensors[names.theirs(f"heads.{index}.output.weight")] = (
                heads.output_weight(index) * heads.config.logit_scale
            )
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _vllm_tensors(heads: MedusaHeads) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in heads.state_dict().items() if ".layers." in name}
    num_outputs = heads.num_heads if heads.config.own_output else 1
    tensors |= {
        f"heads.{index}.output.weight": heads.output_weight(index) for index in range(num_outputs)
    }
    if heads.token_ids is not None:
        tensors["token_ids"] = heads.token_ids
    return {VLLM.theirs(name): tensor for name, tensor in tensors.items()}


def _original_config(heads: MedusaHeads) -> dict[str, Any]:
    config = heads.config
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": config.trained_for,
        # Medusa's code asks the target; vLLM would take 4096, and 32001 tokens
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "medusa_fc_bias": config.bias,
        "outrider": {
            "head": "medusa",
            "target": config.trained_for,
            "output": "own" if config.own_output else "target",
            "accuracies": [list(line) for line in config.accuracies],
        },
    }


def _vllm_config(heads: MedusaHeads) -> dict[str, Any]:
    config = heads.config
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size or config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": not config.own_output,
        "logit_scale": config.logit_scale,
        "torch_dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
        "outrider": {
            "head": "medusa",
            "target": config.trained_for,
            "accuracies": [list(line) for line in config.accuracies],
        },
    }
