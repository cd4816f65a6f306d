"""The report of an explanation: what to do, where drafts are lost and time goes, in a chart; then by
cause and kind of text; then the texts, coloured by fate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from outrider.errors import counted
from outrider.lab.explain.explain_result import (
    CauseRow,
    ExplainedText,
    ExplainResult,
    GroupRow,
    Place,
)
from outrider.report.document import (
    NOTHING,
    Bar,
    Block,
    Bullets,
    Cells,
    Chart,
    Document,
    Heading,
    MarkedTokens,
    Paragraph,
    Token,
    table,
)
from outrider.report.next_step import PROMPTS, command, step
from outrider.report.render import origin
from outrider.report.text import interval, number
from outrider.stats import PartStats

LITTLE = 0.0005  # tokens per step
PROMPT_SHOWN = 1200  # characters
Fate = Literal["prompt", "accepted", "correction", "bonus", "plain"]
CAUSES = {
    "draft": ("the draft disagrees", "the text has a token that the draft did not propose"),
    "vocabulary": ("the draft lacks words", "the text has a token that it can never say"),
    "filters": (
        "filters cut tokens",
        "top-k, top-p or min-p cut the text's token from the draft's distribution, or the draft's "
        "token from the target's",
    ),
    "stopped": (
        "the drafter stopped early",
        "less was drafted than asked for (a stop rule, nothing to copy), and more would have been "
        "accepted",
    ),
    "tree-budget": (
        "the tree is too small",
        "the draft's next favourite, or a leaf as deep as the deepest, would have been accepted",
    ),
    "length": (
        "the draft is too short",
        "everything was accepted, and so would one more token have been",
    ),
}


def document(result: ExplainResult) -> Document:
    """The whole report; everything in it is in the result."""
    first = result.advice[0]
    blocks: list[Block] = [
        Paragraph(f"{_sentence(first.title)}. {_emitted(result)}", first.tone),
        _chart(result),
        Bullets([f"{line.title}. {_sentence(line.evidence)}" for line in result.advice]),
        *_next(result),
        *_tables(result),
        *_texts(result),
        *_circumstances(result),
    ]
    temperature = result.sampling.get("temperature", 0)
    sampled = f"temperature {temperature:g}" if temperature else "greedy"
    texts = f"{counted(result.texts_read, 'text')} of {result.workload}"
    title = f"Why drafts are rejected: {result.target}, {result.configuration}"
    return Document(title, origin(result, sampled, texts), tuple(blocks))


def _emitted(result: ExplainResult) -> str:
    """How much a step brings of what it could, and how sure that is."""
    tau = result.tau
    sure = f" (95 % interval {tau.low:.2f} to {tau.high:.2f})" if tau.is_known else ""
    of_all = (
        f"of the {number(result.ideal / result.steps)} it could"
        if _lost(result)
        else "and could no more"
    )
    alpha = result.alpha
    accepted = "" if alpha is None else f"; {alpha.value:.0%} of the tested drafts are accepted"
    return f"A step emits {tau.value:.2f} tokens{sure} {of_all}{accepted}."


def _chart(result: ExplainResult) -> Chart:
    """A chart of what becomes of a step's tokens and of its time, both as shares."""
    ideal = result.ideal / result.steps
    emitted = result.tau.value
    tokens = [
        Bar("emitted", f"{emitted:.2f} ({_share(emitted, ideal)})", emitted / ideal, tone="good")
    ]
    for row in _lost(result):
        lost = row.tokens_per_step
        text = f"{lost:.2f} ({_share(lost, ideal)})"
        tokens.append(Bar(f"lost: {CAUSES[row.cause][0]}", text, lost / ideal, tone="bad"))
    groups = {f"Tokens that a step could emit: {number(ideal)}": tokens}
    if (times := result.times) is not None:
        parts = {"drafting": times.draft_s, "target pass and the rest": times.rest_s}
        groups[f"Time of a step: {1e3 * times.step_s:.2f} ms"] = [
            Bar(
                label,
                f"{1e3 * seconds:.2f} ms ({_share(seconds, times.step_s)})",
                seconds / times.step_s,
            )
            for label, seconds in parts.items()
        ]
    return Chart(
        "Where drafts are lost, and where time goes", "of a step", "amount", groups, scale=1.0
    )


def _lost(result: ExplainResult) -> list[CauseRow]:
    """The causes that cost something, the largest first."""
    rows = [row for row in result.causes if row.tokens_per_step >= LITTLE]
    return sorted(rows, key=lambda row: -row.tokens)


def _next(result: ExplainResult) -> list[Block]:
    if any(line.tone == "bad" for line in result.advice):
        more = ["--drafters", result.configuration]
        bench = command(result, "bench", result.target, more, PROMPTS)
        return step("Measure whether these drafts pay at all:", bench)
    tune = command(result, "tune", result.target, also=PROMPTS)
    return step("Measure which drafter and which length is fastest on these prompts:", tune)


def _share(part: float, total: float) -> str:
    return f"{part / total:.0%}" if total > 0 else NOTHING


def _tables(result: ExplainResult) -> Iterator[Block]:
    """By cause, by position in the draft, by part of the answer and kind of text."""
    lost = result.ideal - result.emitted
    cells: Cells[CauseRow] = {
        "cause": lambda row: CAUSES[row.cause][0],
        "share": lambda row: _share(row.tokens, lost),
        "tokens lost": lambda row: number(row.tokens, 1),
        "per step": lambda row: number(row.tokens_per_step, 3),
        "lost tokens/s": lambda row: number(row.tokens_per_s, 1),
        "when": lambda row: CAUSES[row.cause][1],
    }
    yield Heading("What was lost")
    if rows := _lost(result):
        yield table(rows, cells, "By cause")
    if result.by_part:
        yield table(list(result.by_part.items()), BY_PART, "By part of the drafter")
    if result.by_level:
        bars = [
            Bar(str(row.level), interval(row.share), row.share.value, row.share.low, row.share.high)
            for row in result.by_level
        ]
        title = "Accepted of the tested draft tokens, by position in the draft"
        yield Chart(title, "draft token", "accepted / tested", {"": bars}, scale=1.0)
    groups = {"part of the answer": result.by_section, "kind of text": result.by_kind}
    parts = {name: [_part(row, rows) for row in rows] for name, rows in groups.items() if rows}
    if parts:
        yield table(parts, PARTS, "By part of the answer and kind of text")


BY_PART: Cells[tuple[str, PartStats]] = {
    "part": lambda row: row[0],
    "steps": lambda row: str(row[1].steps),
    "drafted tokens": lambda row: str(row[1].drafted),
    "accepted tokens": lambda row: str(row[1].accepted),
    "accepted of drafted": lambda row: _share(row[1].accepted, row[1].drafted),
}
# a row, its share of the tokens lost to rejections, its share of all tokens
Part = tuple[GroupRow, str, str]
PARTS: Cells[Part] = {
    "text": lambda part: part[0].name,
    "share of losses": lambda part: part[1],
    "share of tokens": lambda part: part[2],
    "accepted": lambda part: number(part[0].share),
    "tested": lambda part: str(part[0].tested),
    "TV": lambda part: number(part[0].disagreement, 3),
    "entropy": lambda part: number(part[0].entropy, 3),
}


def _part(row: GroupRow, rows: Sequence[GroupRow]) -> Part:
    lost = _share(row.lost, sum(other.lost for other in rows))
    return row, lost, _share(row.tokens, sum(other.tokens for other in rows))


def _texts(result: ExplainResult) -> Iterator[Block]:
    if not result.texts:
        return
    yield Heading("The texts")
    yield Paragraph(
        "Point at a token, or tap it, for its numbers: p is the target, q the draft."
        + (" Greedy text shows both at temperature 1." if result.is_greedy else "")
    )
    for text in result.texts:
        has_task = text.task not in ("", "other")
        title = f"{text.id} ({text.task})" if text.id and has_task else text.id or "Text"
        yield MarkedTokens(title, token_text(text))


def _circumstances(result: ExplainResult) -> Iterator[Block]:
    yield Heading("How it was found")
    sampling = ", ".join(f"{name} {value}" for name, value in result.sampling.items())
    source = (
        "distributions are from one more pass of each model over the finished text"
        if result.has_draft_probs
        else "what else this drafter might have proposed at a position is not known"
    )
    items = [
        f"{counted(result.emitted, 'token')} in {counted(result.steps, 'step')}, "
        f"{counted(result.drafted, 'draft token')}, {result.tested} tested, {result.accepted} "
        f"accepted; verifier {result.verifier}; {sampling}",
        source,
    ]
    if result.times is not None:
        steps = counted(result.times.steps, "step")
        items.append(f"times are means of {steps}, without each text's first, the prompt's")
    items += map(_sentence, result.notes)
    if result.command:
        items.append(f"command: {result.command}")
    yield Bullets(items)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def token_text(text: ExplainedText) -> Sequence[Token]:
    """Prompt first, then every output token with its numbers."""
    cut = len(text.prompt) > PROMPT_SHOWN
    prompt = "… " + text.prompt[-PROMPT_SHOWN:] if cut else text.prompt
    tokens = [Token(prompt, "prompt")]
    for index, place in enumerate(text.places, 1):
        fate: Fate = place.fate  # type: ignore[assignment]
        tokens.append(Token(place.piece, fate, place.rejected, "\n".join(_card(place, index))))
    return tokens


def _card(place: Place, number: int) -> Iterator[str]:
    """The token, its place in the draft, how likely it was to both models, what was drafted
    instead."""
    where = place.kind if place.section == "text" else f"{place.kind}, {place.section}"
    yield (
        f"{place.piece!r}: {place.fate} · {where} · token {number}, "
        f"number {place.level + 1} of its step"
    )
    yield f"p {_value(place.p_token)}, entropy {_value(place.p_entropy)}"
    if place.q_token is not None:
        yield (
            f"q {_value(place.q_token)}, entropy {_value(place.q_entropy)}, "
            f"rank {place.rank_token} in q"
        )
        yield f"total variation {_value(place.disagreement)}"
    if place.rejected:
        more = f" and {len(place.tested) - 1} more" if len(place.tested) > 1 else ""
        q = "" if place.q_draft is None else f", q {_value(place.q_draft)}"
        yield (
            f"drafted {place.rejected!r}{more}: p {_value(place.p_draft)}{q}, "
            f"rank {place.rank_draft} in p"
        )
    if place.cause is not None:
        yield f"lost here {_value(sum(place.lost.values()))} tokens: {CAUSES[place.cause][0]}"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
