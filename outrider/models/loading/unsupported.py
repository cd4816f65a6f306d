"""Models that our cache cannot serve, each with one clause that says why.

Such a model runs on transformers' own cache (`stateful/`). What no cache helps is refused in one
sentence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from outrider.errors import CapabilityError, CheckpointError
from outrider.lazy import transformers
from outrider.models.card import ModelCard
from outrider.models.indexer import KEPT_LAYER, indexer_layers
from outrider.models.probes.reference import plain_logits
from outrider.wellformed import load_object

# names of classes
OTHER_HEADS = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice|RewardModel\w*)$")
OWN_CACHE_ROUNDS = "on transformers' own cache a token rounds with the number of tokens in its pass"
# transformers' that hold keys and values, or nothing
PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")


class OwnCacheNeededError(CapabilityError):
    """Our cache cannot serve the model; the message is a clause that says why."""


def refuse_other_heads(name: str, config: Any) -> None:
    """Raise CapabilityError for an encoder-decoder or half of one, and for a checkpoint trained to
    classify or to find answers.

    The latter's tied embeddings would pass for an output layer.
    """
    if getattr(config, "is_encoder_decoder", False) or getattr(
        type(config), "is_encoder_decoder", False
    ):
        raise CapabilityError(
            f"'{name}' ({config.model_type}) is an encoder-decoder; a decoder-only model is needed."
        )
    if kind := next(
        (each for each in getattr(config, "architectures", None) or () if OTHER_HEADS.search(each)),
        None,
    ):
        raise CapabilityError(
            f"'{name}' is a {kind}, which has no output layer over the vocabulary. A language "
            "model is needed."
        )


def refuse_unknown_kinds(name: str, error: Exception) -> None:
    """Raise CapabilityError where reading a config failed because transformers does not know its
    kinds of layers."""
    match = re.search(r"The `(\w+)` entries must be in (\(.*\)) but got (\[.*\])", str(error))
    if match is None:
        return
    known, kinds = (ast.literal_eval(match[group]) for group in (2, 3))
    unknown = ", ".join(f"'{kind}'" for kind in dict.fromkeys(kinds) if kind not in known)
    raise CapabilityError(
        f"'{name}': its config.json has layers of a kind that transformers "
        f"{transformers.__version__} does not know ({match[1]}: "
        f"{unknown}). It knows {', '.join(known)}. A newer transformers may know more."
    ) from error


def refuse_other_writers(module: Any, name: str) -> None:
    """Raise CapabilityError for a model that writes no text, or that reads prompts in both
    directions (PaliGemma)."""
    config = module.config.get_text_config()
    name = f"{name} ({module.config.model_type})"
    if module.get_output_embeddings() is None:
        raise CapabilityError(
            f"{name}: {type(module).__name__} in transformers has no output layer over a "
            "vocabulary, so it writes no text. "
            "A language model is needed."
        )
    if getattr(config, "num_hidden_layers", None) is None:
        raise CapabilityError(
            f"{name} is made of several decoders (its config has no num_hidden_layers); one is "
            "needed."
        )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise CapabilityError(
            f"{name}: tokens of a prompt also attend to later ones (use_bidirectional_attention "
            "in its config). A decoder of one "
            "direction is needed."
        )


def refuse_other_caches(module: Any, device: torch.device) -> None:
    """Raise OwnCacheNeededError where transformers' own cache keeps more of a layer than keys and
    values.

    A pass over a few tokens does not show what comes into play with longer texts: which keys a
    sparse attention picks, what it compresses.
    """
    config = module.config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()) or getattr(
        config, "attn_temperature_tuning", False
    ):
        raise OwnCacheNeededError(
            "its attention within chunks, and its scales of queries by position, are not Outrider's"
        )
    try:
        layers = transformers.DynamicCache(config=config).layers
    except Exception:  # noqa: BLE001  some configs describe no such cache; the passes that follow will tell
        return
    plain = (
        (*PLAIN_LAYERS, KEPT_LAYER)
        if device.type == "cpu" and indexer_layers(module)
        else PLAIN_LAYERS
    )
    others = dict.fromkeys(kind for layer in layers if (kind := type(layer).__name__) not in plain)
    if others:
        raise OwnCacheNeededError(
            f"its layers keep more than keys and values of each token ({', '.join(others)})"
        )


def refuse_silent_layers(module: Any, silent: Sequence[int]) -> NoReturn:
    """Raise OwnCacheNeededError for the layers that never called our attention."""
    raise OwnCacheNeededError(
        f"{len(silent)} of its layers (first: layer {silent[0]}) do not call the attention "
        "interface of transformers, through "
        "which Outrider keeps keys and values"
    )


def refuse_failure(error: Exception) -> NoReturn:
    """Raise OwnCacheNeededError for model code that failed in a probing pass; `error` itself where
    memory ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    reason = (str(error).strip().splitlines() or [""])[0]
    raise OwnCacheNeededError(
        f"its code fails in a pass on our cache ({type(error).__name__}: {reason})"
    ) from error


def refuse_other_logits(
    module: Any, name: str, tokens: Tensor, tolerance: float, what: str
) -> NoReturn:
    """Raise OwnCacheNeededError for a model whose logits on our cache are not its own,
    CapabilityError where rounding is why.

    `what`: which logits differ by how much; more than `tolerance` of their range is too much.
    """
    logits = _plain_logits(module, tokens, "eager")
    if (
        type(module)._supports_sdpa
        and (logits - _plain_logits(module, tokens, "sdpa")).abs().max()
        > tolerance * logits.abs().max()
    ):
        dtype = str(module.dtype).removeprefix("torch.")
        raise CapabilityError(
            f"{name}: {what}. Two of transformers' own kernels (eager, sdpa) differ as much: "
            f"rounding in {dtype}. "
            "Use --dtype float32."
        )
    raise OwnCacheNeededError(
        f"its layers compute something that Outrider's attention does not: {what}"
    )


def _plain_logits(module: Any, tokens: Tensor, kernel: str) -> Tensor:
    """fp32 logits (1, T, V) of the module's own pass with this attention of transformers."""
    module.set_attn_implementation(kernel)
    with torch.inference_mode():
        return plain_logits(module, tokens).float()


def why_rows_differ(card: ModelCard, device: torch.device) -> str:
    """Why a token's bits depend on the other tokens of its pass."""
    if device.type != "cpu":
        return "kernels there differ with the size of a pass"
    if card.quantisation is not None:
        return f"its quantised layers ({card.quantisation}) round with the tokens of a pass"
    if card.has_experts:
        return "its experts multiply the tokens of a pass together"
    return "its layers round with the tokens of a pass"


REMEDY = "read it, then pass --trust-remote-code (trust_remote_code=True in Python)"


def refuse_untrusted(name: str, part: str, error: Exception) -> None:
    """Raise CheckpointError where transformers refused because `part` ("model", "tokenizer") needs
    the checkpoint's own code."""
    if "contains custom code" not in str(error):
        return
    files = _files(Path(name), "tokenizer_config.json" if part == "tokenizer" else "config.json")
    named = f" ({', '.join(files)})" if files else ""
    raise CheckpointError(
        f"the {part} of '{name}' needs Python code of the checkpoint's own{named}: {REMEDY}."
    ) from error


def ignored_code(config: Any, module: Any, trusted: bool, name: str) -> list[str]:
    """A note where a checkpoint brings code for its model and transformers' own class runs instead."""
    class_name = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if trusted or not class_name:
        return []
    runs = type(module).__name__
    return [
        f"'{name}' brings code of its own ({class_name}), transformers' {runs} runs instead; trust_remote_code=true runs its own"
    ]


def _files(folder: Path, file: str) -> list[str]:
    """Files of code that a local checkpoint names; none for one on the hub."""
    try:
        named = load_object(folder / file).get("auto_map") or {}
    except (OSError, ValueError):
        return []
    classes = [
        entry
        for value in named.values()
        for entry in (value if isinstance(value, list) else [value])
        if entry
    ]
    return sorted({entry.split("--")[-1].rpartition(".")[0] + ".py" for entry in classes})
