"""Why a model cannot run on our cache, read from its code and config: a clause that is true of it.

Such a model runs on transformers' own cache (`stateful/`). What no cache helps is refused in one sentence.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.lazy import transformers
from outrider.models.indexer import KEPT_LAYER, indexer_layers
from outrider.models.probes.reference import plain_logits
from outrider.models.quantised.checkpoint import quantisation_of
from outrider.models.quantised.scheme import has_experts

STATEFUL_KINDS = ("linear_attention", "mamba", "conv", "recurrent")  # values of a config's `layer_types`
OTHER_HEADS = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice|RewardModel\w*)$")  # names of classes
OWN_CACHE_ROUNDS = "on transformers' own cache a token rounds with the number of tokens in its pass"
ENCODER = "Its tokens also attend to later ones (an encoder such as BERT), so it cannot continue a text."
PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")  # transformers' that hold keys and values, or nothing


class OwnCacheNeededError(CapabilityError):
    """Our cache cannot serve the model; the message is a clause that says why."""


def refuse_both_directions(module: Any, name: str) -> None:
    """Raise CapabilityError for a model whose config lets tokens of a prompt attend to later ones (PaliGemma's)."""
    if getattr(module.config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        raise CapabilityError(
            f"{name} ({module.config.model_type}): tokens of a prompt also attend to later ones (use_bidirectional_attention in "
            "its config), which no cache of Outrider's does. A decoder of one direction is needed."
        )


def refuse_other_heads(name: str, config: Any) -> None:
    """Raise CapabilityError for an encoder-decoder, and for a checkpoint that was trained to classify or to point at answers.

    The latter's tied embeddings would pass for an output layer.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise CapabilityError(f"'{name}' ({config.model_type}) is an encoder-decoder; a decoder-only model is needed.")
    if kind := next((each for each in getattr(config, "architectures", None) or () if OTHER_HEADS.search(each)), None):
        raise CapabilityError(f"'{name}' is a {kind}, which has no output layer over the vocabulary. A language model is needed.")


def refuse_unknown_kinds(name: str, error: Exception) -> None:
    """Raise CapabilityError where reading a config failed because transformers does not know its kinds of layers."""
    found = re.search(r"The `(\w+)` entries must be in (\(.*\)) but got (\[.*\])", str(error))
    if found is None:
        return
    known, kinds = (ast.literal_eval(found[group]) for group in (2, 3))
    unknown = ", ".join(f"'{kind}'" for kind in dict.fromkeys(kinds) if kind not in known)
    raise CapabilityError(
        f"'{name}': its config.json has layers of a kind that transformers {transformers.__version__} does not know ({found[1]}: "
        f"{unknown}). It knows {', '.join(known)}. A newer transformers may know more."
    ) from error


def refuse_without_vocabulary(module: Any, name: str) -> None:
    """Raise CapabilityError for a model that has no output layer over a vocabulary (Pi 0 moves robots)."""
    if module.get_output_embeddings() is None:
        raise CapabilityError(
            f"{name} ({module.config.model_type}): {type(module).__name__} in transformers has no output layer over a "
            "vocabulary, so it writes no text. A language model is needed."
        )


def refuse_other_caches(module: Any, device: torch.device) -> None:
    """Raise OwnCacheNeededError where transformers' own cache keeps more of a layer than keys and values.

    A pass over a few tokens does not show what comes into play with longer texts: which keys a sparse attention picks, what it
    compresses.
    """
    config = module.config.get_text_config(decoder=True)
    if getattr(config, "num_hidden_layers", None) is None:  # BLT's: of bytes, and of patches
        what = "it is made of several decoders (its config has no num_hidden_layers)"
        raise OwnCacheNeededError(f"{what}, and Outrider's cache is that of one")
    try:
        layers = transformers.DynamicCache(config=config).layers
    except Exception:  # noqa: BLE001  some configs describe no such cache; the passes that follow will tell
        return
    plain = (*PLAIN_LAYERS, KEPT_LAYER) if device.type == "cpu" and indexer_layers(module) else PLAIN_LAYERS
    if other := [layer for layer, kept in enumerate(layers) if type(kept).__name__ not in plain]:
        which, stateful = _which(config, other), _keeps_state(module, getattr(config, "layer_types", None), other[0])
        if stateful:
            raise OwnCacheNeededError(_running_state(which))
        if getattr(config, "index_topk", None):
            raise OwnCacheNeededError(f"{SPARSE} {'does on a CPU alone' if indexer_layers(module) else DOES_NOT}")
        raise OwnCacheNeededError(f"{which} keep more than keys and values of each token ({type(layers[other[0]]).__name__})")


SPARSE = "its attention is sparse: an indexer picks the keys of each token, which Outrider's attention"
DOES_NOT = "does not do"


def refuse_silent_layers(module: Any, silent: Sequence[int]) -> NoReturn:
    """Raise OwnCacheNeededError for the layers that never called our attention."""
    config, code = module.config.get_text_config(), type(module).__name__
    if _keeps_state(module, getattr(config, "layer_types", None), silent[0]):
        raise OwnCacheNeededError(_running_state(_which(config, silent)))
    biases = ", with ALiBi position biases," if _has_alibi(module) else ""
    raise OwnCacheNeededError(
        f"the code of {code} in transformers computes attention itself{biases} and does not call the attention "
        "interface through which Outrider keeps keys and values"
    )


def _which(config: Any, layers: Sequence[int]) -> str:
    kinds = getattr(config, "layer_types", None)
    first = f"layer {layers[0]}" + (f", {kinds[layers[0]]}" if kinds else "")
    return f"{len(layers)} of {config.num_hidden_layers} layers (first: {first})"


def _running_state(which: str) -> str:
    return f"{which} keep one running state (recurrent, linear attention, convolution) instead of keys and values for each token"


def refuse_failure(module: Any, error: Exception) -> NoReturn:
    """Raise OwnCacheNeededError for model code that failed in a probing pass; `error` itself where memory ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    code = type(module).__name__
    if getattr(module.config.get_text_config(), "index_topk", None):
        what = f"{SPARSE} {DOES_NOT}"
    else:
        reason = (str(error).strip().splitlines() or [""])[0]
        what = f"the code of {code} fails in a pass over a few tokens ({type(error).__name__}: {reason})"
    raise OwnCacheNeededError(what) from error


def refuse_other_logits(module: Any, name: str, tokens: Tensor, tolerance: float, what: str) -> NoReturn:
    """Raise OwnCacheNeededError for a model whose logits on our cache are not its own, CapabilityError where no cache would help.

    `what`: which logits differ by how much; more than `tolerance` of their range is too much.
    """
    module.set_attn_implementation("eager")
    if sees_later(module, tokens):
        raise CapabilityError(f"{name}: {what}. {ENCODER}")
    own = _plain_logits(module, tokens, "eager")
    if type(module)._supports_sdpa and (own - _plain_logits(module, tokens, "sdpa")).abs().max() > tolerance * own.abs().max():
        dtype = str(module.dtype).removeprefix("torch.")
        raise CapabilityError(
            f"{name}: {what}. Two of transformers' own kernels (eager, sdpa) differ as much: rounding in {dtype}. "
            "Use --dtype float32."
        )
    beyond = "position biases or a mask of their own"
    raise OwnCacheNeededError(f"its layers compute something that Outrider's attention does not ({beyond}): {what}")


def is_decoder(config: Any) -> bool:
    """Whether a config that could make an encoder makes a decoder; all others do."""
    return getattr(config, "is_decoder", getattr(config, "causal", True))


def sees_later(module: Any, tokens: Tensor) -> bool:
    """Whether the logits of first tokens depend on the last ones of texts (B, T)."""
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % module.config.get_text_config().vocab_size
    with torch.inference_mode():
        own, other = (plain_logits(module, ids).float()[:, 0] for ids in (tokens, changed))
    return not torch.allclose(own, other, rtol=1e-3, atol=1e-5)


def _plain_logits(module: Any, tokens: Tensor, kernel: str) -> Tensor:
    """fp32 logits (1, T, V) of the module's own pass with this attention of transformers."""
    module.set_attn_implementation(kernel)
    with torch.inference_mode():
        return plain_logits(module, tokens).float()


def why_rows_differ(config: Any, device: torch.device) -> str:
    """What makes a token's bits depend on the other tokens of its pass."""
    if device.type != "cpu":
        return "kernels there differ with the size of a pass"
    if (method := quantisation_of(config)) is not None:
        return f"its quantised layers ({method}) round with the tokens of a pass"
    if has_experts(config):
        return "its experts multiply the tokens of a pass together"
    return "its layers round with the tokens of a pass"


def _keeps_state(module: Any, kinds: Sequence[str] | None, layer: int) -> bool:
    if kinds:
        return any(kind in kinds[layer] for kind in STATEFUL_KINDS)
    return bool(getattr(module, "_is_stateful", False))


def _has_alibi(module: Any) -> bool:
    """Whether the model adds ALiBi biases: by its config, else by the parameters of its layers' code."""
    config = module.config.get_text_config()
    alibi = getattr(getattr(config, "attn_config", config), "alibi", None)
    if alibi is not None:
        return bool(alibi)
    return any("alibi" in inspect.signature(part.forward).parameters for part in module.modules())
