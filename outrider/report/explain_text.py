"""One explained text as tokens with their fates, and the card of numbers behind each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from outrider.lab.explain.explain_result import LETTERS, TextColumns
from outrider.report.document import Token

Fate = Literal["prompt", "accepted", "correction", "bonus", "plain"]
PROMPT_SHOWN = 1200  # characters
CONTEXT = 28
CAUSES = {
    "draft": "the draft disagrees", "vocabulary": "a word the draft lacks", "filters": "filters",
    "stopped": "the drafter stopped early", "tree-budget": "the tree is too small", "length": "the draft is too short",
    "verifier": "the verifier's gap",
}  # fmt: skip


def token_text(text: TextColumns) -> Sequence[Token]:
    """Prompt first, then every output token with its numbers."""
    prompt = text.prompt if len(text.prompt) <= PROMPT_SHOWN else "… " + text.prompt[-PROMPT_SHOWN:]
    return [Token(prompt, "prompt"), *(_token(text, place) for place in range(len(text.pieces)))]


def costliest(texts: Sequence[TextColumns], most: int) -> list[list[str]]:
    """The rejections of the shown texts that cost most: what stood before, tokens, position, numbers."""
    found = [
        (text.lost[place] or 0.0, text, place)
        for text in texts for place, fate in enumerate(text.fate) if LETTERS["fate"][fate] == "correction" and text.draft[place]
    ]  # fmt: skip
    found.sort(key=lambda one: -one[0])
    return [_rejection(text, place) for lost, text, place in found[:most] if lost > 0]


def _rejection(text: TextColumns, place: int) -> list[str]:
    before = (text.prompt[-CONTEXT:] + "".join(text.pieces[:place]))[-CONTEXT:]
    entropies = "/".join(_value(value) for value in (text.p_entropy[place], text.q_entropy[place]) if value is not None)
    return [
        "…" + before.replace("\n", "↵"), repr(text.draft[place]), repr(text.pieces[place]), LETTERS["kind"][text.kind[place]],
        str(text.level[place]), _value(text.p_draft[place]), _value(text.q_draft[place]), _value(text.p_token[place]),
        str(text.rank_draft[place] or "-"), entropies, _value(text.lost[place]),
    ]  # fmt: skip


def _token(text: TextColumns, place: int) -> Token:
    fate: Fate = LETTERS["fate"][text.fate[place]]  # type: ignore[assignment]
    rejected = text.draft[place] if fate == "correction" else ""
    return Token(text.pieces[place], fate, rejected, "\n".join(_lines(text, place, fate)))


def _lines(text: TextColumns, place: int, fate: Fate) -> list[str]:
    """The card: what it is, where it stood in the draft, how likely it was to both, what was drafted instead."""
    kind, section = LETTERS["kind"][text.kind[place]], LETTERS["section"][text.section[place]]
    where = f"{kind}, {section}" if section != "text" else kind
    lines = [f"{text.pieces[place]!r}: {fate} · {where} · token {place + 1}, number {text.level[place] + 1} of its step"]
    lines.append(_pair("p", text.p_token[place], text.p_entropy[place]))
    if text.q_token[place] is not None:
        rank = text.rank_token[place]
        lines.append(_pair("q", text.q_token[place], text.q_entropy[place]) + ("" if rank is None else f", rank {rank} in q"))
        lines.append(f"total variation {_value(text.disagreement[place])}")
    if text.draft[place]:
        lines.append(_draft(text, place))
    if text.kept_chance[place] is not None:
        lines.append(f"chance {_value(text.kept_chance[place])}" + (" (kept)" if fate == "accepted" else ""))
    cause = text.cause[place]
    if cause != ".":
        lines.append(f"lost here {_value(text.lost[place])} tokens: {CAUSES[LETTERS['cause'][cause]]}")
    return lines


def _pair(name: str, value: float | None, entropy: float | None) -> str:
    return f"{name} {_value(value)}, entropy {_value(entropy)}"


def _draft(text: TextColumns, place: int) -> str:
    more = f" and {text.siblings[place] - 1} more" if text.siblings[place] > 1 else ""
    q = "" if text.q_draft[place] is None else f", q {_value(text.q_draft[place])}"
    rank = "" if text.rank_draft[place] is None else f", rank {text.rank_draft[place]} in p"
    return f"drafted {text.draft[place]!r}{more}: p {_value(text.p_draft[place])}{q}{rank}"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
