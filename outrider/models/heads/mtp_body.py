"""The decoder layer of an MTP head, made by transformers' code for the target's family.

It is a whole language model of one layer, without its tables: so weights are named and converted as
that family's are (experts that are stored one by one, for instance), and a pass goes the way that a
pass of the target goes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError, CheckpointError
from outrider.kv import LayerShape
from outrider.lazy import transformers
from outrider.models import attention
from outrider.models.heads.mtp_layout import BLOCK, NORM
from outrider.models.indexer import keep_choices
from outrider.models.latent import keep_latents
from outrider.models.loading.unsupported import (
    OwnCacheNeededError,
    refuse_other_caches,
    refuse_silent_layers,
)
from outrider.models.probes.probe import see_layers
from outrider.models.signals import decoder_layers

TABLE = 8  # rows of its tables, which nobody reads
# Fields by which families say which layers have experts, and what they must be for a single layer
# with and without.
EXPERT_FIELDS: dict[str, tuple[Any, Any]] = {
    "first_k_dense_replace": (0, 1), "mlp_only_layers": ([], [0]), "decoder_sparse_step": (1, 1), "moe_layer_start_index": (0, 1),
    "moe_layer_end_index": (0, 0), "moe_layer_interval": (1, 1), "mlp_layer_types": (["sparse"], ["dense"]),
}  # fmt: skip
FULL = "full_attention"
# kinds of blocks that keep keys and values, or nothing
STATELESS = ("full_attention", "attention", "moe", "mlp")
Body = tuple[nn.Module, nn.Module, LayerShape, int | None]  # what `make_body` gives


def one_layer_config(config: Any, *, has_experts: bool, kinds: str = "", index: int = 0) -> Any:
    """A target's config for one more of its layers, with full attention unless the config says
    otherwise of MTP layer `index`.

    `kinds`: where a layer is several blocks, the config's list of what they are.
    """
    text = copy.deepcopy(config.get_text_config(decoder=True))
    types = getattr(text, "layer_types", None)
    layer_types = getattr(text, "mtp_layer_types", None)
    text.num_hidden_layers = 1
    if types:
        usual = FULL if FULL in types else types[-1]
        text.layer_types = [layer_types[min(index, len(layer_types) - 1)] if layer_types else usual]
    if getattr(text, "indexer_types", None):
        text.indexer_types = ["full"]  # a single layer has nobody's choice of keys to share
    if kinds:
        text.layer_types = list(getattr(text, kinds))
    for name, (with_experts, without) in EXPERT_FIELDS.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, with_experts if has_experts else without)
    text.vocab_size = TABLE
    text.bos_token_id = None
    text.eos_token_id = None
    text.pad_token_id = None if text.pad_token_id is None else 0  # some must have one
    if hasattr(text, "quantization_config"):
        del text.quantization_config  # its weights are plain by now
    return text


def make_body(
    what: str,
    config: Any,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    kinds: str = "",
    index: int = 0,
) -> Body:
    """A decoder of one layer that ends without a norm; that norm; what our cache keeps of a token;
    its window.

    `tensors`: of the layer (`block.*`, of several blocks `block.N.*`, see `one_layer_config`) and
    the norm. Raises CheckpointError, beginning with `what`, where they are not what a layer of this
    family has, CapabilityError for a layer that our cache does not serve.
    """
    text = one_layer_config(
        config, has_experts=any(".experts." in name for name in tensors), kinds=kinds, index=index
    )
    code = _code_of(what, text, config)
    norm = _norm_name(code, text)
    outer = "" if _is_decoder(code, text) else f"{code.base_model_prefix}."
    inner = f"{outer}layers." if kinds else f"{outer}layers.0."
    state = {
        inner + name.removeprefix(f"{BLOCK}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(BLOCK)
    }
    final = {
        name.removeprefix(NORM): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{NORM}.")
    }
    state |= {f"{outer}{norm}{name}": tensor for name, tensor in final.items()}
    with in_silence():
        module, report = code.from_pretrained(
            None,
            config=text,
            state_dict=state,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _check(what, code, report, inner, f"{outer}{norm}.")
    return body_of(what, module, device)


def empty_model(what: str, text: Any, dtype: torch.dtype) -> Any:
    """A language model by a config of `one_layer_config`, without storage but for its tables, which
    nobody reads."""
    code = _code_of(what, text, text)
    with torch.device("meta"):
        module = code._from_config(text, dtype=dtype)
    for table in (module.get_input_embeddings(), module.get_output_embeddings()):
        table.weight = nn.Parameter(
            torch.zeros(table.weight.shape, dtype=dtype), requires_grad=False
        )
    return module


def body_of(what: str, module: Any, device: torch.device) -> Body:
    """The body that `make_body` promises, from a whole model of one layer."""
    norm = _norm_name(type(module), module.config)
    module.to(device).eval().requires_grad_(False)
    attention.register()
    keep_choices(module)
    try:
        blocks = getattr(module.config, "layers_block_type", None)
        # older transformers takes a block of experts for one with a state
        if blocks is None or set(blocks) - set(STATELESS):
            refuse_other_caches(module, module.device)
        keep_latents(module)
        matches = see_layers(module)
        if len(matches) != 1:
            refuse_silent_layers(module, [0])
    except OwnCacheNeededError as error:
        raise CapabilityError(
            f"{what}: its layer does not run on Outrider's cache: {error}. Use --drafter ngram."
        ) from error
    (seen,) = matches.values()
    return *_without_norm(module, norm), seen.kind.shape, seen.window


def copied_body(what: str, target: Any, device: torch.device) -> Body:
    """A body that begins as the last of a target's layers with full attention, in fp32.

    Raises CapabilityError, beginning with `what`, where no layer can be copied: one in integers,
    for instance.
    """
    for layer in reversed(list(decoder_layers(target, what))):
        there = layer.state_dict()
        text = one_layer_config(
            target.config, has_experts=any("experts." in name for name in there)
        )
        module = _code_of(what, text, target.config)(text)
        copy_to = module.base_model.layers[0]
        if {name: tensor.shape for name, tensor in copy_to.state_dict().items()} == {
            n: t.shape for n, t in there.items()
        }:
            norm = _norm_name(type(module), text)
            base = module.base_model
            model = target.get_decoder()
            copy_to.load_state_dict(there)
            getattr(base, norm).load_state_dict(getattr(model, norm).state_dict())
            return body_of(what, module.float(), device)
    raise CapabilityError(f"{what}: none of the target's layers with full attention can be copied")


def _without_norm(module: Any, norm: str) -> tuple[nn.Module, nn.Module]:
    """The decoder, which reads embeddings and ends without its norm, and that norm."""
    decoder = module.base_model
    last = getattr(decoder, norm)
    setattr(decoder, norm, nn.Identity())
    decoder.set_input_embeddings(nn.Identity())
    return decoder, last


def _code_of(what: str, text: Any, config: Any) -> Any:
    """transformers' class for language models of a family, or for the decoder inside its models
    that take pictures, too."""
    plain = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    mixed = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(text) in plain:
        return plain[type(text)]
    if type(config) not in mixed:
        raise CapabilityError(
            f"{what}: its layer is of {type(text).__name__}, a family that transformers has no "
            "code for"
        )
    with torch.device("meta"):
        return type(mixed[type(config)](copy.deepcopy(config)).get_decoder())


def _is_decoder(code: Any, text: Any) -> bool:
    """Whether a class is a decoder, without an output head."""
    return code is not transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)


def _norm_name(code: Any, text: Any) -> str:
    """The name of the final norm in a family's decoder."""
    with torch.device("meta"):
        whole = code(copy.deepcopy(text))
    decoder = whole.base_model
    parts = decoder.named_children()
    norms = [
        name for name, part in parts if "norm" in name and getattr(part, "weight", None) is not None
    ]
    if len(norms) != 1 or not hasattr(decoder, "layers"):
        raise CapabilityError(
            f"MTP heads of {code.__name__} are not read: its final norm or its layers were not "
            "found"
        )
    return norms[0]


def _check(what: str, code: Any, report: Mapping[str, Any], inner: str, last: str) -> None:
    """Raises CheckpointError where tensors are missing, left over, or of another shape."""
    missing = sorted(
        name.removeprefix(inner)
        for name in report["missing_keys"]
        if name.startswith((inner, last))
    )
    left = sorted(name.removeprefix(inner) for name in report["unexpected_keys"])
    if missing or left:
        problems = [
            *(f"lacks '{name}'" for name in missing[:1]),
            *(f"has '{name}', which is no part of it" for name in left[:1]),
        ]
        raise CheckpointError(
            f"{what} is no layer of {code.__name__}: it {' and '.join(problems)}."
        )
    mismatches = [
        each
        for each in report["mismatched_keys"]
        if "embed" not in each[0] and "lm_head" not in each[0]
    ]
    if mismatches:
        name, actual, wanted = sorted(mismatches)[0]
        raise CheckpointError(
            f"{what}: tensor '{name.removeprefix(inner)}' has shape {list(actual)}, expected "
            f"{list(wanted)}: it was trained "
            "for another target."
        )


@contextmanager
def in_silence() -> Iterator[None]:
    """transformers says nothing of tables that are not there, and shows no bars."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
