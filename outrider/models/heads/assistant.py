"""An assistant: a small decoder that drafts on the target's own keys and values, a checkpoint of
its own.

    step k    (token k, state k)  ->  pre_projection  ->  a few layers  ->  logits of token k + 1
                                                                      ->  post_projection  ->  state k + 1

Token 0 is the pending one, state 0 the target's last, after its final norm; tokens are embedded by
the target. The layers have queries alone: those of a kind (full attention, sliding window) read
what the target's last layer of that kind with keys of its own has cached. The assistant keeps
nothing of a text and reads no prompt. It stands at the pending token's position throughout a draft.

A `masked_embedding` scores clusters of tokens first, then the tokens of the best clusters. Others
are never drafted. GGUF files lack how many clusters count, so their tensors for it are left out:
all tokens are scored, as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError, CheckpointError, OutriderError
from outrider.kv import LayerShape
from outrider.lazy import transformers
from outrider.models.families import ASSISTANTS
from outrider.models.gguf.architectures import ARCHITECTURES, own_config
from outrider.models.gguf.header import GgufFile
from outrider.models.gguf.loading import USED_ELSEWHERE, plain_values
from outrider.models.heads.mtp_body import in_silence
from outrider.models.heads.source import read_config
from outrider.models.linear.pack import can_pack, pack_linears
from outrider.models.lm import LM
from outrider.models.source import ModelSource, weights_folder

LEFT_OUT = ("masked_embd_", *USED_ELSEWHERE)  # beginnings of names in GGUF files
SLIDING = "sliding_attention"
OUTSIDE = -1e9  # logit of a token that is never drafted


def is_assistant(source: ModelSource) -> bool:
    """Whether a folder or a GGUF file holds such a checkpoint, by its config."""
    if source.gguf is not None:
        return source.gguf.architecture == ASSISTANTS.architecture
    return (
        source.folder is not None
        and read_config(source.folder).get("model_type") in ASSISTANTS.model_types
    )


def _config_of(source: ModelSource) -> dict[str, Any]:
    if source.gguf is not None:
        return gguf_config(source.gguf)
    return {} if source.folder is None else read_config(source.folder)


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of an assistant, from a GGUF file's metadata. Raises CheckpointError where
    the metadata lacks something."""
    size = file.of_model("embedding_length_out")
    count = file.of_model("block_count")
    if size is None:
        lacks = f"lacks '{ASSISTANTS.architecture}.embedding_length_out' of its metadata"
        raise CheckpointError(f"'{file.path}' {lacks}. Convert it again.")
    whole = replace(
        file,
        metadata={f"{ASSISTANTS.architecture}.attention.shared_kv_layers": count, **file.metadata},
    )
    text = own_config(whole, ARCHITECTURES[ASSISTANTS.like]) | {
        "final_logit_softcapping": None,
        "attention_bias": False,
    }
    rows = next(
        (tensor.shape[0] for tensor in file.tensors if tensor.name == "token_embd.weight"), None
    )
    text |= {
        "vocab_size": rows or text.get("vocab_size"),
        "num_kv_shared_layers": count,
        "tie_word_embeddings": True,
    }
    return {
        "model_type": ASSISTANTS.model_types[0],
        "backbone_hidden_size": size,
        "text_config": text,
    }


def _gguf_tensors(file: GgufFile) -> dict[str, Tensor]:
    """The tensors by the names of transformers' module, in plain numbers. Raises CheckpointError
    for one that is no part."""
    tensors = dict[str, Tensor]()
    for tensor in file.tensors:
        if not tensor.name.startswith(LEFT_OUT):
            name = ASSISTANTS.names.ours(tensor.name)
            if name == tensor.name:
                raise CheckpointError(
                    f"'{file.path}' has '{tensor.name}', which is no part of an assistant."
                )
            tensors[name] = torch.from_numpy(plain_values(tensor).copy())
    return tensors


def read_layers(config: Any) -> dict[str, int]:
    """By kind of attention, the target's last layer with keys and values of its own. Empty for
    models without such kinds."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    own_layers = kinds[: len(kinds) - (getattr(text, "num_kv_shared_layers", 0) or 0)]
    return {kind: index for index, kind in enumerate(own_layers)}


def check_fits(source: ModelSource, target_config: Any) -> None:
    """Raises CheckpointError for an assistant of another target, as far as the configs tell."""
    config = _config_of(source)
    target = target_config.get_text_config()
    text = config.get("text_config") or {}
    for name, expected in (
        ("backbone_hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
    ):
        value = config.get(name, text.get(name))
        if value is not None and value != expected:
            what = f"the assistant in '{source.name}' was made for another target"
            raise CheckpointError(f"{what}: {name} is {value}, expected {expected}.")
    if lacking := sorted({*text.get("layer_types", ())} - read_layers(target_config).keys()):
        raise CheckpointError(
            f"the assistant in '{source.name}' was made for another target: it reads the keys of "
            f"layers with {lacking[0]}, and "
            f"{target.model_type} has none. It drafts for the model that it is named after."
        )


@dataclass(frozen=True)
class Attended:
    """The attention inputs of one draft: by kind of attention, keys and values (B, KV heads, S, D)
    and their mask (B, 1, 1, S)."""

    shared: Mapping[str, tuple[Tensor, Tensor]]
    masks: Mapping[str, Tensor]
    positions: Tensor  # (B, 1), of the pending tokens


class Assistant:
    """An assistant at work alongside its target."""

    def __init__(
        self, module: Any, target: LM, layers: Mapping[str, int], embedding: nn.Module
    ) -> None:
        """`layers`: of the target, by kind (`read_layers`); `embedding`: the target's."""
        self._module = module
        self._target = target
        self._layers = layers
        self._embedding = embedding
        text = module.config.get_text_config()
        self._window: int = text.sliding_window
        self.max_positions: int = text.max_position_embeddings

    def look(self, lengths: Sequence[int]) -> Attended:
        """The masks of rows whose caches hold this many committed tokens."""
        kv = self._target.kv
        device = self._target.device
        shared = dict[str, tuple[Tensor, Tensor]]()
        masks = dict[str, Tensor]()
        for kind, layer in self._layers.items():
            bases = (
                [0] * len(lengths) if kv.layers[layer].window is None else kv.bases[: len(lengths)]
            )
            # as they lie in their slots
            held = [end - base for end, base in zip(lengths, bases, strict=True)]
            first = [max(0, end - self._window - 1) if kind == SLIDING else 0 for end in held]
            low = min(first)
            high = max(held)
            positions = torch.arange(low, high, device=device)
            begins = torch.tensor(first, device=device)
            ends = torch.tensor(held, device=device)
            masks[kind] = ((positions >= begins[:, None]) & (positions < ends[:, None]))[
                :, None, None
            ]
            keys, values = (
                store[layer][: len(lengths), low:high].transpose(1, 2)
                for store in (kv.keys, kv.values)
            )
            shared[kind] = keys, values
        return Attended(shared, masks, torch.tensor(lengths, device=device)[:, None])

    def step(self, tokens: Tensor, states: Tensor, seen: Attended) -> tuple[Tensor, Tensor]:
        """Logits (B, M, V) after tokens (B, M) and states (B, M, H) of the target's width, and the
        states that follow."""
        module = self._module
        width = tokens.shape[1]
        inputs = module.pre_projection(
            torch.cat([self._embedding(tokens).to(states.dtype), states], dim=-1)
        )
        output = module.model(
            inputs_embeds=inputs,
            position_ids=seen.positions.expand(-1, width),
            use_cache=False,
            attention_mask={
                kind: mask.expand(-1, -1, width, -1) for kind, mask in seen.masks.items()
            },
            # as 0, several tokens fail in transformers 5.23
            shared_kv_states=dict(seen.shared),
            logits_to_keep=None,
        ).last_hidden_state
        return self._logits(output), module.post_projection(output)

    def _logits(self, states: Tensor) -> Tensor:
        chooser = self._module.masked_embedding
        head = self._module.lm_head
        if chooser is None:
            return head(states)
        # (C, tokens of each)
        clusters = chooser.token_ordering.long().view(chooser.num_centroids, -1)
        best = chooser.centroids(states).topk(chooser.centroid_intermediate_top_k, dim=-1).indices
        tokens = clusters[best].flatten(-2)  # (B, M, K)
        scores = (head.weight[tokens] @ states[..., None])[..., 0]
        return states.new_full((*states.shape[:-1], chooser.vocab_size), OUTSIDE).scatter_(
            -1, tokens, scores
        )


@contextmanager
def every_layer_shares() -> Iterator[None]:
    """Lets transformers make models whose layers all read another's keys and values, which 5.23
    refuses."""
    known = [
        getattr(transformers, name) for name in ASSISTANTS.decoders if hasattr(transformers, name)
    ]
    kinds = [kind for kind in known if "kv_sharing_modes" in vars(kind)]
    before = [vars(kind)["kv_sharing_modes"] for kind in kinds]
    for kind, modes in zip(kinds, before, strict=True):
        kind.kv_sharing_modes = property(partial(_modes, modes.fget))
    try:
        yield
    finally:
        for kind, modes in zip(kinds, before, strict=True):
            kind.kv_sharing_modes = modes


def _modes(modes: Callable[[Any], list[str | None]], config: Any) -> list[str | None]:
    alone = config.num_kv_shared_layers == config.num_hidden_layers
    return ["reuse"] * config.num_hidden_layers if alone else modes(config)


def load_assistant(
    source: ModelSource, target: LM, target_config: Any, embedding: nn.Module
) -> Assistant:
    """The assistant in a folder or a GGUF file. Raises CheckpointError where it is damaged or was
    made for another target."""
    what = f"the assistant in '{source.name}'"
    check_fits(source, target_config)
    if target.why_own_cache is not None:
        raise CapabilityError(
            f"{what} reads the target's keys and values, which this target keeps on transformers' "
            "cache"
        )
    with in_silence(), every_layer_shares():
        try:
            folder: Path | None = None
            if source.gguf is not None:
                config = transformers.AutoConfig.for_model(**gguf_config(source.gguf))
                kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
                files = {"config": config, "state_dict": _gguf_tensors(source.gguf)}
            else:
                folder = weights_folder(source)
                kind = transformers.AutoModelForCausalLM
                files = {"local_files_only": True}
            module, report = kind.from_pretrained(
                folder,
                dtype=target.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                attn_implementation="sdpa",
                **files,
            )
        except OutriderError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{what} cannot be loaded: {str(error).strip().splitlines()[0]}"
            ) from error
    if lacking := sorted(report["missing_keys"]):
        raise CheckpointError(f"{what} is incomplete: it lacks '{lacking[0]}'.")
    if other := sorted(report["mismatched_keys"]):
        name, actual, wanted = other[0]
        raise CheckpointError(
            f"{what} is damaged: '{name}' has shape {list(actual)}, expected {list(wanted)}."
        )
    for name, tensor in module.named_parameters():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{what} is damaged: '{name}' has NaN or infinite values.")
    kinds = module.config.get_text_config().layer_types
    layers = {kind: index for kind, index in read_layers(target_config).items() if kind in kinds}
    _check_shapes(what, module.config.get_text_config(), target.shape.layers, layers)
    module = module.eval().requires_grad_(False).to(target.device)
    if can_pack(target.device, target.dtype):
        # the chooser picks rows of the output head
        pack_linears(module if module.masked_embedding is None else module.model)
    return Assistant(module, target, layers, embedding)


def _check_shapes(
    what: str, text: Any, shapes: Sequence[LayerShape], layers: Mapping[str, int]
) -> None:
    """Raises CheckpointError where the assistant's queries do not fit the keys that they meet."""
    for index, kind in enumerate(text.layer_types):
        layer_config = text.per_layer_config[index]
        there = shapes[layers[kind]]
        actual = (layer_config.num_key_value_heads, layer_config.head_dim)
        expected = (there.num_kv_heads, there.key_size)
        if actual != expected:
            raise CheckpointError(
                f"{what} was made for another target: its layers with {kind} read {actual[0]} key "
                f"heads of size {actual[1]}, the "
                f"target has {expected[0]} of {expected[1]}."
            )
