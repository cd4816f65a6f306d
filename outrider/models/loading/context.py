"""How many tokens a model's context holds, how many were asked for, and the message where the two
differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from outrider.errors import ConfigError
from outrider.models.card import ModelCard

if TYPE_CHECKING:
    from outrider.models.probes.probe import AttentionCall

# whose frequencies change with the longest position of a pass
CHANGING_ROPES = ("dynamic", "longrope")
UNKNOWN_CONTEXT = 1 << 20  # tokens, for a config that names no limit


def configured_context(config: Any) -> int:
    """Positions that the config names."""
    return _named(config.get_text_config())


def context_length(config: Any) -> int:
    """Positions the model may use. LongRoPE models change every position's rotation once a pass
    goes beyond the original context, which would make cached keys depend on the pass that wrote
    them: they are held to the original context."""
    longest = _named(config)
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            longest = min(
                longest,
                original or getattr(config, "original_max_position_embeddings", None) or longest,
            )
    return longest


def reaches(config: Any, layers: Sequence[AttentionCall]) -> list[int]:
    """Numbers of tokens beyond which Outrider makes another model of it. `layers`: none on
    transformers' own cache.

    A window that is in transformers' mask alone (Phi MoE, Qwen2 MoE with windows) hides nothing
    from our attention. Where layers keep a prompt whole and forget the answer after a window
    (Unlimited OCR), a row must not ask which is which.
    """
    window = sliding_window(config)
    kinds = getattr(config, "layer_types", None)
    if window and "reference_sliding_attention" in (kinds or ()):
        return [window]
    if kinds is None:
        kinds = [] if any(layer.window for layer in layers) else ["sliding_attention"]
    slide = [
        kind == "sliding_attention" and not layer.window
        for kind, layer in zip(kinds, layers, strict=False)
    ]
    return [window] if window and any(slide) else []


def sliding_window(config: Any) -> int | None:
    """The window that the config names, unless it says that none is used."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None)


def hold_positions(module: nn.Module) -> None:
    """Keep the frequencies of rotary embeddings as they are.

    Code of the kinds `dynamic` and `longrope` makes others of a pass that goes beyond the context
    of `context_length`, which no row does. It looks at its longest position for that; from now on
    it does not, so a table may be made of all positions at once.
    """
    for part in module.modules():
        kinds: Any = getattr(part, "rope_type", None)
        if isinstance(kinds, dict):
            part.rope_type = {layer: _steady(kind) for layer, kind in kinds.items()}  # type: ignore[assignment]
        elif isinstance(kinds, str):
            part.rope_type = _steady(kinds)  # type: ignore[assignment]


def _steady(kind: str) -> str:
    return "default" if kind in CHANGING_ROPES else kind


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Rotary positions of all layers, or of each kind of them."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]


def _named(config: Any) -> int:
    """Positions that the config names, or stretches the original ones to: Qwen's cards add YaRN and
    leave the number."""
    longest = getattr(config, "max_position_embeddings", None) or 0
    if longest <= 0:  # XLNet's, which has no limit, says -1
        return UNKNOWN_CONTEXT
    yarn = [rope for rope in _ropes(config) if rope.get("rope_type") == "yarn"]
    originals = [
        (rope.get("original_max_position_embeddings") or longest, rope.get("factor") or 1)
        for rope in yarn
    ]
    return max([longest, *(int(original * factor) for original, factor in originals)])


def check_asked(asked: int | None, holds: int, name: str) -> None:
    """Raise ConfigError where more tokens are asked for than the config names, which are `holds`."""
    if asked is not None and asked > holds:
        raise ConfigError(
            f"max_model_len {asked} is more than '{name}' can hold: {holds} tokens "
            "(max_position_embeddings in its config.json). "
            f"Give at most {holds}, or leave it out; a longer context takes a checkpoint that was "
            "made for one."
        )


def held_context(
    asked: int | None, holds: int, card: ModelCard, name: str, notes: list[str]
) -> int:
    """Tokens a row may have on a loaded model that holds `holds`. Adds a note where that is less
    than its config says.

    Raises ConfigError where more are asked for.
    """
    if holds >= card.context_length:
        return min(asked or holds, holds)
    why = "its positions beyond are scaled by LongRoPE, which changes keys that are cached already"
    if card.usable_context > holds:
        why = "after them its code hides tokens where Outrider's attention cannot see it"
    if asked is not None and asked > holds:
        raise ConfigError(
            f"max_model_len {asked} is more than '{name}' can hold here: {holds} tokens ({why}). "
            f"Give at most {holds}."
        )
    if asked is None:
        notes.append(
            f"'{name}' holds {holds} tokens here, not the {card.context_length} of its config: "
            f"{why}"
        )
    return asked or holds


def shorter_draft(draft: int, context: int, name: str) -> list[str]:
    """A note where a draft model holds fewer tokens than rows may have."""
    if draft >= context:
        return []
    return [
        f"the draft '{name}' holds {draft} tokens, rows may have {context}: beyond {draft} nothing is drafted "
        f"(--max-model-len {draft}, a draft with a longer context, or its option window=auto)"
    ]
