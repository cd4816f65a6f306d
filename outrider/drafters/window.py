"""The option `window` of drafters with a cache of their own: a draft model's, or a head's, attention
sees the last positions of a text alone.

A draft model or head drafts well in texts as long as those it was trained on. In longer ones, rotary
positions are relative, so it drafts as well if it sees no further back than it did in training (the
sliding window of StreamingLLM, 2309.17453, without its sinks). What no window reaches is not kept,
so a draft costs the same in a text of any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NoReturn

from outrider.drafters.base import DraftSetup
from outrider.errors import CapabilityError, ConfigError
from outrider.models.loaded import LoadedModel
from outrider.runtime.derived import windowed_lm

Window = int | Literal["auto"]


def check_window(window: Window) -> None:
    """Raise ConfigError for a number that is no length."""
    if window != "auto" and window < 0:
        raise ConfigError(
            f"window must be auto, 0 (all of a text) or a number of tokens, got {window}"
        )


def window_of(
    asked: Window, trained: int | None, context: int, num_draft_tokens: int, owner: str
) -> int | None:
    """The positions that a draft sees; None: all.

    `trained`: tokens of the texts that it was trained on, None where nobody says; `context`: tokens
    that rows may have. Raises ConfigError for a window smaller than a draft.
    """
    window = trained if asked == "auto" else asked or None
    if window is None or (asked == "auto" and window >= context):
        return None
    if window <= num_draft_tokens:
        stands_for = f"auto, here {window}," if asked == "auto" else window
        raise ConfigError(
            f"{owner}: window={stands_for} is smaller than a draft of {num_draft_tokens} tokens: at "
            f"least {num_draft_tokens + 1}, or window=0 for all of a text"
        )
    return min(window, context)


def trained_length(known: int | None, values: Mapping[str, Any]) -> int | None:
    """Tokens of the texts that a model was trained on, by its config: those before its rotary
    positions were stretched, else all that it knows. Llama 3 was trained on as it is stretched."""
    ropes = [values, *_mappings(values), *_mappings(values.get("rope_parameters"))]
    originals = [
        rope.get("original_max_position_embeddings")
        for rope in ropes
        if "llama3" not in (rope.get("rope_type"), rope.get("type"))
    ]
    lengths = [known, *originals]
    return min((n for n in lengths if isinstance(n, int) and n > 0), default=None)


def window_notes(asked: Window, window: int | None, name: str) -> list[str]:
    """A note on the window that auto chose; nothing where another was asked for."""
    if asked != "auto":
        return []
    seen = "all of a text" if window is None else f"the last {window} tokens"
    return [f"window=auto: '{name}' sees {seen} while it drafts"]


def head_window(
    setup: DraftSetup, kind: str, trained: int | None, name: str, notes: list[str]
) -> int | None:
    """The positions that a trained head sees; None: all. Adds a note on what auto came to. Raises
    ConfigError for a window smaller than a draft."""
    asked = setup.settings.window
    context = setup.target.lm.shape.context_length
    window = window_of(asked, trained, context, setup.num_draft_tokens, f"drafter '{kind}'")
    notes += window_notes(asked, window, name)
    return window


def windowed_draft(
    draft: LoadedModel, asked: Window, context: int, num_draft_tokens: int
) -> tuple[LoadedModel, list[str]]:
    """The draft model with this window, on a cache of its own, and notes. Where there is none it is
    the same model.

    Raises ConfigError for a window smaller than a draft, CapabilityError for a model that cannot
    have one.
    """
    if asked == 0:
        return draft, []
    card, lm = draft.card, draft.lm
    if lm.shape.states or lm.why_own_cache:
        _refuse(draft, lm.why_own_cache or "it keeps running states instead of positions")
    if any(layer.is_indexer for layer in lm.shape.layers):
        _refuse(draft, "its indexers choose the positions that it sees")
    if not _is_rotary(card.values):
        _refuse(draft, "its positions are not rotary, and only those are relative")
    trained = trained_length(card.context_length or None, card.values)
    owner = "drafter 'draft-model'"
    window = window_of(asked, trained, context, num_draft_tokens, owner)
    notes = window_notes(asked, window, draft.label)
    if window is None:
        return draft, notes
    try:
        windowed = windowed_lm(lm, window, context)
    except CapabilityError as error:
        _refuse(draft, str(error))
    return replace(draft, lm=windowed, draft_loop=None), notes


def _refuse(draft: LoadedModel, why: str) -> NoReturn:
    raise CapabilityError(
        f"'{draft.label}' takes no window: {why}. Leave window out, or draft with another model."
    )


def _mappings(values: Any) -> list[Mapping[str, Any]]:
    if not isinstance(values, Mapping):
        return []
    return [value for value in values.values() if isinstance(value, Mapping)]


def _is_rotary(values: Mapping[str, Any]) -> bool:
    """Whether a config has rotary positions, and no others."""
    return not values.get("alibi") and any(
        name.startswith(("rope", "rotary")) and value is not None for name, value in values.items()
    )
