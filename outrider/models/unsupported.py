"""Why a model cannot run on our cache, told from its code and config: one sentence that is true of it, and what runs instead."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.models.quantised.scheme import has_experts
from outrider.models.quantised_checkpoint import quantisation_of

RUNS = (
    "Outrider runs decoders that attend over the keys and values of each token through transformers' attention interface "
    "(Llama, Qwen, Mistral, Gemma, GPT-2, GPT-NeoX, Phi, OLMo, ...)."
)
STATEFUL_KINDS = ("linear_attention", "mamba", "conv", "recurrent")  # values of a config's `layer_types`


class UnsupportedAttentionError(Exception):
    """A layer's attention asks for something that ours does not compute; the message says what."""


def refuse_silent_layers(module: Any, silent: Sequence[int], dropped: bool, name: str) -> NoReturn:
    """Raise CapabilityError for the layers that never called our attention with a plan.

    `dropped`: our attention was called, but without the keyword arguments of the pass.
    """
    config, code = module.config.get_text_config(), type(module).__name__
    kinds = getattr(config, "layer_types", None)
    first = f"layer {silent[0]}" + (f", {kinds[silent[0]]}" if kinds else "")
    which = f"{len(silent)} of {config.num_hidden_layers} layers (first: {first})"
    if _keeps_state(module, kinds, silent[0]):
        raise CapabilityError(
            f"{name}: {which} keep one running state (recurrent, linear attention, convolution) instead of keys and values "
            f"for each token, and a state cannot take rejected draft tokens back. {RUNS}"
        )
    if dropped:
        raise CapabilityError(
            f"{name}: the code of {code} in transformers does not pass keyword arguments on to its attention, so Outrider's "
            f"cache cannot reach {which}. {RUNS}"
        )
    biases = ", with ALiBi position biases," if _has_alibi(module) else ""
    raise CapabilityError(
        f"{name}: the code of {code} in transformers computes attention itself{biases} and does not call the attention "
        f"interface through which Outrider keeps keys and values. {RUNS}"
    )


def refuse_failure(module: Any, error: Exception, name: str) -> NoReturn:
    """Raise CapabilityError for model code that failed in a probing pass; `error` itself where memory ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    code = type(module).__name__
    if isinstance(error, UnsupportedAttentionError):
        what = str(error)
    elif getattr(module.config.get_text_config(), "index_topk", None):
        what = "its attention is sparse: an indexer picks the keys of each token, which Outrider's attention does not do"
    else:
        reason = (str(error).strip().splitlines() or [""])[0]
        what = f"the code of {code} fails in a pass over a few tokens ({type(error).__name__}: {reason})"
    raise CapabilityError(f"{name}: {what}. {RUNS}") from error


def why_logits_differ(module: Any, tokens: Tensor, tolerance: float) -> str:
    """Finds why a model's logits on our cache differ from its own by more than `tolerance` of their range.

    It tries what a few plain passes over `tokens` show.
    """
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % module.config.get_text_config().vocab_size
    own = _plain_logits(module, tokens, "eager")
    if not torch.allclose(own[:, 0], _plain_logits(module, changed, "eager")[:, 0], rtol=1e-3, atol=1e-5):
        return f"Its tokens also attend to later ones (an encoder such as BERT), so it cannot continue a text. {RUNS}"
    if type(module)._supports_sdpa and (own - _plain_logits(module, tokens, "sdpa")).abs().max() > tolerance * own.abs().max():
        dtype = str(module.dtype).removeprefix("torch.")
        return f"Two of transformers' own kernels (eager, sdpa) differ as much: rounding in {dtype}. Use --dtype float32."
    what = "position biases such as ALiBi, a mask of their own"
    return f"Its layers compute something that Outrider's attention does not ({what}). {RUNS}"


def _plain_logits(module: Any, tokens: Tensor, kernel: str) -> Tensor:
    """fp32 logits (1, T, V) of the module's own pass with this attention of transformers."""
    module.set_attn_implementation(kernel)
    with torch.inference_mode():
        return module(input_ids=tokens, use_cache=False).logits.float()


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
    said = getattr(getattr(config, "attn_config", config), "alibi", None)
    if said is not None:
        return bool(said)
    return any("alibi" in inspect.signature(part.forward).parameters for part in module.modules())
