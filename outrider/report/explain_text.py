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
    "draft": ("the draft disagrees", "p and q differ: for one drawn token their total variation, 1 - sum min(p, q)"),
    "vocabulary": ("words the draft lacks", "mass of p on tokens that the draft can never emit"),
    "filters": ("filters", "what top-k, top-p and min-p change, by cutting other tokens from p than from q; negative where they "
                "help"),
    "stopped": ("the drafter stopped early", "less was drafted than asked for (a stop rule, nothing to copy), and more would "
                "have been kept"),
    "tree-budget": ("the tree is too small", "one more sibling, or a leaf as deep as the deepest, would have kept more"),
    "length": ("the draft is too short", "everything was kept, and so would one more token have been"),
    "verifier": ("the verifier's gap", "what the best lossless rule for the same draft would keep more (optimal transport; for a "
                 "chain, block verification)"),
    "luck": ("luck", "fewer tokens than the distributions promise. 0 on average; the spread is one standard deviation"),
}  # fmt: skip


def token_text(text: TextColumns) -> Sequence[Token]:
    """Prompt first, then every output token with its numbers."""
    prompt = text.prompt if len(text.prompt) <= PROMPT_SHOWN else "… " + text.prompt[-PROMPT_SHOWN:]
    return [Token(prompt, "prompt"), *(_token(text, index) for index in range(len(text.pieces)))]


def costliest(texts: Sequence[TextColumns], limit: int) -> list[list[str]]:
    """The rejections of the shown texts that cost most: what stood before, tokens, position, numbers."""
    found = [
        (text.lost[index] or 0.0, text, index)
        for text in texts for index, fate in enumerate(text.fate) if LETTERS["fate"][fate] == "correction" and text.draft[index]
    ]  # fmt: skip
    found.sort(key=lambda one: -one[0])
    return [_rejection(text, index) for lost, text, index in found[:limit] if lost > 0]


def _rejection(text: TextColumns, index: int) -> list[str]:
    before = (text.prompt[-CONTEXT:] + "".join(text.pieces[:index]))[-CONTEXT:]
    entropies = "/".join(_value(value) for value in (text.p_entropy[index], text.q_entropy[index]) if value is not None)
    return [
        "…" + before.replace("\n", "↵"), repr(text.draft[index]), repr(text.pieces[index]), LETTERS["kind"][text.kind[index]],
        str(text.level[index]), _value(text.p_draft[index]), _value(text.q_draft[index]), _value(text.p_token[index]),
        str(text.rank_draft[index] or "-"), entropies, _value(text.lost[index]),
    ]  # fmt: skip


def _token(text: TextColumns, index: int) -> Token:
    fate: Fate = LETTERS["fate"][text.fate[index]]  # type: ignore[assignment]
    rejected = text.draft[index] if fate == "correction" else ""
    return Token(text.pieces[index], fate, rejected, "\n".join(_lines(text, index, fate)))


def _lines(text: TextColumns, index: int, fate: Fate) -> list[str]:
    """The card: what it is, where it stood in the draft, how likely it was to both, what was drafted instead."""
    kind, section = LETTERS["kind"][text.kind[index]], LETTERS["section"][text.section[index]]
    where = f"{kind}, {section}" if section != "text" else kind
    lines = [f"{text.pieces[index]!r}: {fate} · {where} · token {index + 1}, number {text.level[index] + 1} of its step"]
    lines.append(_pair("p", text.p_token[index], text.p_entropy[index]))
    if text.q_token[index] is not None:
        rank = text.rank_token[index]
        lines.append(_pair("q", text.q_token[index], text.q_entropy[index]) + ("" if rank is None else f", rank {rank} in q"))
        lines.append(f"total variation {_value(text.disagreement[index])}")
    if text.draft[index]:
        lines.append(_draft(text, index))
    if text.kept_chance[index] is not None:
        lines.append(f"chance {_value(text.kept_chance[index])}" + (" (kept)" if fate == "accepted" else ""))
    cause = text.cause[index]
    if cause != ".":
        lines.append(f"lost here {_value(text.lost[index])} tokens: {CAUSES[LETTERS['cause'][cause]][0]}")
    return lines


def _pair(name: str, value: float | None, entropy: float | None) -> str:
    return f"{name} {_value(value)}, entropy {_value(entropy)}"


def _draft(text: TextColumns, index: int) -> str:
    more = f" and {text.siblings[index] - 1} more" if text.siblings[index] > 1 else ""
    q = "" if text.q_draft[index] is None else f", q {_value(text.q_draft[index])}"
    rank = "" if text.rank_draft[index] is None else f", rank {text.rank_draft[index]} in p"
    return f"drafted {text.draft[index]!r}{more}: p {_value(text.p_draft[index])}{q}{rank}"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
