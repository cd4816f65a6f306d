"""The report of an explanation: what to do, what each cause cost, where; then the texts, coloured
by fate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    Block,
    Bullets,
    Document,
    Fact,
    Heading,
    MarkedTokens,
    Paragraph,
    Plot,
    Series,
    Table,
    Token,
    Tone,
    table,
)
from outrider.report.render import origin
from outrider.report.text import number

NOTHING = 0.0005  # tokens per step
PROMPT_SHOWN = 1200  # characters
Fate = Literal["prompt", "accepted", "correction", "bonus", "plain"]
CAUSES = {
    "draft": ("the draft disagrees", "the text has a token that the draft did not propose"),
    "vocabulary": ("words the draft lacks", "the text has a token that the draft can never say"),
    "filters": (
        "filters",
        "top-k, top-p or min-p cut the text's token from the draft's distribution, or the draft's "
        "token from the target's",
    ),
    "stopped": (
        "the drafter stopped early",
        "less was drafted than asked for (a stop rule, nothing to copy), and more would have been kept",
    ),
    "tree-budget": (
        "the tree is too small",
        "the draft's next favourite, or a leaf as deep as the deepest, would have been kept",
    ),
    "length": (
        "the draft is too short",
        "everything was kept, and so would one more token have been",
    ),
}


def document(result: ExplainResult) -> Document:
    """The whole report; everything in it is in the result."""
    blocks: list[Block] = [Paragraph(*_verdict(result)), Heading("What to do")]
    for line in result.advice:
        blocks.append(Paragraph(f"{line.title}. {_sentence(line.evidence)}", line.tone))
    blocks += [*_causes(result), *_where(result), *_texts(result)]
    blocks += _circumstances(result)
    temperature = result.sampling.get("temperature", 0)
    sampled = f"temperature {temperature:g}" if temperature else "greedy"
    texts = f"{counted(result.texts_read, 'text')} of {result.workload}"
    title = f"Why drafts are rejected: {result.target}, {result.configuration}"
    return Document(title, origin(result, sampled, texts), tuple(blocks))


def _verdict(result: ExplainResult) -> tuple[str, Tone]:
    alpha = ""
    if result.alpha is not None:
        alpha = f", and {result.alpha.value:.0%} of the tested draft tokens are kept"
    tau = number(result.tau.value)
    biggest = max(result.causes, key=lambda row: row.tokens)
    if biggest.tokens_per_step < NOTHING:
        return f"A step emits {tau} tokens, all that it could have{alpha}.", "good"
    return (
        f"A step emits {tau} of the {number(result.ideal / result.steps)} tokens it could have{alpha}. "
        f"The largest loss is {number(biggest.tokens_per_step)} tokens a step: "
        f"{CAUSES[biggest.cause][0]}."
    ), "plain"


def _causes(result: ExplainResult) -> Iterator[Block]:
    yield Heading("What was lost, to what")
    rows = [row for row in result.causes if row.tokens_per_step >= NOTHING]
    rows.sort(key=lambda row: -row.tokens)
    lost = result.ideal - result.emitted
    rates = [row.tokens_per_s for row in rows if row.tokens_per_s is not None]
    total = CauseRow(
        cause="together",
        tokens=lost,
        tokens_per_step=lost / result.steps,
        tokens_per_s=sum(rates) if result.times else None,
    )
    facts: list[Fact[CauseRow]] = [
        Fact("cause", lambda row: CAUSES.get(row.cause, (row.cause,))[0], align="left"),
        Fact(
            "tokens lost",
            lambda row: number(row.tokens, 1),
            "what the steps could have emitted (asked for + 1, as far as the text goes, and the "
            "next token of drafts kept whole) - what they emitted",
        ),
        Fact("per step", lambda row: number(row.tokens_per_step, 3)),
        Fact(
            "tokens/s",
            lambda row: number(row.tokens_per_s, 1),
            "tokens lost / seconds of the steps, before the price of what it takes",
        ),
        Fact("share", lambda row: _share(row.tokens, lost)),
    ]
    yield table([*rows, total], facts)
    yield Bullets([": ".join(CAUSES[row.cause]) for row in rows])


def _share(part: float, total: float) -> str:
    return f"{part / total:.0%}" if total > 0 else "-"


def _where(result: ExplainResult) -> Iterator[Block]:
    yield Heading("Where")
    levels = result.by_level
    if levels:
        line = Series(
            "observed",
            [row.share.value for row in levels],
            [row.share.low for row in levels],
            [row.share.high for row in levels],
        )
        yield Plot(
            "Kept, by position in the draft",
            "draft token of the step",
            "kept / tested",
            [float(row.level) for row in levels],
            (line,),
        )
    if result.by_section:
        yield _groups("By part of the answer", "part", result.by_section, explained=False)
    yield _groups("By kind of text", "kind", result.by_kind, explained=True)


def _groups(title: str, heading: str, rows: Sequence[GroupRow], *, explained: bool) -> Table:
    """`explained`: the columns' meaning is given; once on a page is enough."""
    tokens = sum(row.tokens for row in rows)
    lost = sum(row.lost for row in rows)

    def kept(row: GroupRow) -> str:
        return "-" if row.share is None else f"{row.share.value:.2f} ({row.kept} of {row.tested})"

    facts: list[Fact[GroupRow]] = [
        Fact(heading, lambda row: row.name, align="left"),
        Fact("tokens", lambda row: _share(row.tokens, tokens), "share of all output tokens"),
        Fact("kept / tested", kept),
        Fact("lost", lambda row: number(row.lost, 1), "tokens lost to rejections there"),
        Fact("of all losses", lambda row: _share(row.lost, lost)),
        Fact(
            "TV",
            lambda row: number(row.disagreement, 3),
            "mean total variation of the two distributions (greedy: at temperature 1)",
        ),
        Fact("entropy", lambda row: number(row.entropy, 3), "mean of the target's, nats"),
    ]
    return table(rows, facts if explained else [replace(fact, help="") for fact in facts], title)


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
    items = [
        f"{counted(result.emitted, 'token')} in {counted(result.steps, 'step')}, "
        f"{counted(result.drafted, 'draft token')}, {result.tested} tested, {result.accepted} "
        f"accepted; verifier {result.verifier}; {sampling}"
    ]
    if result.has_draft_probs:
        items.append(
            "distributions come from one more pass of each model over the finished text; the step "
            "that tested a token saw the same text before it"
        )
    else:
        items.append("what else this drafter might have proposed at a position is not known")
    if result.times is not None:
        times = result.times
        items.append(
            f"a step took {times.step_s * 1e3:.2f} ms, {times.draft_s * 1e3:.2f} ms of it drafting "
            f"(mean of {counted(times.steps, 'step')}; each text's first one, which reads the "
            "prompt, left out)"
        )
    items += [_sentence(note) for note in result.notes]
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
