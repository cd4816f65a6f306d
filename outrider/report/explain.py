"""The report of an explanation: what to do, what each cause cost, where; then the texts, coloured by fate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from outrider.counted import counted
from outrider.lab.explain.explain_result import LETTERS, CauseRow, Counterfactual, ExplainResult, GroupRow, TextColumns
from outrider.report.document import (
    Block,
    Bullets,
    Column,
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

MAX_REJECTIONS = 12
NOTHING = 0.0005  # tokens per step
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


def document(result: ExplainResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = [Paragraph(*_verdict(result)), *_advice(result), *_causes(result), *_where(result)]
    blocks += [*_confusions(result), *_costliest(result), *_counterfactuals(result), *_texts(result), *_circumstances(result)]
    temperature = result.sampling.get("temperature", 0)
    sampled = f"temperature {temperature:g}" if temperature else "greedy"
    subtitle = origin(result, sampled, f"{counted(result.texts_read, 'text')} of {result.workload}")
    return Document(f"Why drafts are rejected: {result.target}, {result.configuration}", subtitle, tuple(blocks))


def _verdict(result: ExplainResult) -> tuple[str, Tone]:
    alpha = f", {result.alpha.value:.0%} of tested draft tokens are kept" if result.alpha else ""
    biggest = max(result.causes, key=lambda row: row.tokens)
    text = (
        f"A step emits {number(result.tau.value)} tokens of {number(result.ideal / result.steps)} it could have{alpha}. "
        f"The largest loss: {CAUSES[biggest.cause][0]}, {number(biggest.tokens_per_step)} tokens a step."
    )
    if biggest.tokens_per_step < NOTHING:
        return f"A step emits {number(result.tau.value)} tokens, all that it could have{alpha}.", "good"
    return text, "plain"


def _advice(result: ExplainResult) -> Iterator[Block]:
    yield Heading("What to do")
    for line in result.advice:
        yield Paragraph(f"{line.title}. {_sentence(line.evidence)}", line.tone)


def _causes(result: ExplainResult) -> Iterator[Block]:
    yield Heading("What was lost, to what")
    always = ("draft",) if result.is_greedy else ("draft", "luck")  # greedy decoding tosses no coins
    rows = [row for row in result.causes if abs(row.tokens_per_step) >= NOTHING or row.cause in always]
    rows.sort(key=lambda row: (row.cause == "luck", -row.tokens))
    lost = result.ideal - result.emitted
    cells = [
        [
            CAUSES[row.cause][0], number(row.tokens, 1), number(row.tokens_per_step, 3), number(row.tokens_per_s, 1),
            _share(row.tokens, lost),
        ]
        for row in rows
    ]  # fmt: skip
    total = sum(row.tokens_per_s for row in rows if row.tokens_per_s is not None) if result.times else None
    cells.append(["together", number(lost, 1), number(lost / result.steps), number(total, 1), "100%" if lost else "-"])
    yield Table(
        (
            Column("cause", "left"),
            Column("tokens lost", help="ideal - emitted, split exactly; ideal: tokens asked for + 1 per step, as far as the text "
                   "goes, and the next token of drafts kept whole"),
            Column("per step"),
            Column("tokens/s", help="tokens lost / seconds of the steps: what the same time would have yielded more, before the "
                   "price of what it takes"),
            Column("share"),
        ),
        cells,
    )  # fmt: skip
    yield Bullets([f"{CAUSES[row.cause][0]}: {CAUSES[row.cause][1]}{_spread(row)}" for row in rows])


def _spread(row: CauseRow) -> str:
    return "" if row.spread is None else f" (here {row.tokens:+.1f} ± {row.spread:.1f})"


def _share(part: float, total: float) -> str:
    return f"{part / total:.0%}" if total > 0 else "-"


def _where(result: ExplainResult) -> Iterator[Block]:
    yield Heading("Where")
    levels = result.by_level
    if levels:
        yield Plot(
            "Kept, by position in the draft", "draft token of the step", "kept / tested", [float(row.level) for row in levels],
            (
                Series(
                    "observed", [row.share.value for row in levels], [row.share.low for row in levels],
                    [row.share.high for row in levels],
                ),
                Series("expected", [row.expected for row in levels]),
            ),
        )  # fmt: skip
    if result.by_section:
        yield _groups("By part of the answer", "part", result.by_section, explained=False)
    if result.by_entropy:
        yield _groups("By the target's entropy", "nats", result.by_entropy, explained=False)
    yield _groups("By kind of text", "kind", result.by_kind, explained=True)
    if total := sum(row.rejections for row in result.ranks):
        yield Table(
            (
                Column("rank", "left", help="of the text's token in the draft's distribution, 1 = likeliest. Rank 1 is rejected "
                       "where the draft drew another token"),
                Column("rejections"), Column("share"),
            ),
            [[row.rank, str(row.rejections), _share(row.rejections, total)] for row in result.ranks],
            title="What stood there instead: how near the draft was",
        )  # fmt: skip


def _groups(title: str, heading: str, rows: Sequence[GroupRow], *, explained: bool) -> Table:
    """`explained`: the columns' meaning is given; once on a page is enough."""
    tokens, lost = sum(row.tokens for row in rows), sum(row.lost for row in rows)
    facts: list[Fact[GroupRow]] = [
        Fact(heading, lambda row: row.name, align="left"),
        Fact("tokens", lambda row: _share(row.tokens, tokens), "share of all output tokens"),
        Fact("kept / tested", _kept),
        Fact("expected", lambda row: number(row.expected), "mean probability of being kept, before draws and coins"),
        Fact(
            "lost", lambda row: number(row.lost, 1),
            "tokens lost to rejections there; luck, and drafts that were too short, left out",
        ),
        Fact("of all losses", lambda row: _share(row.lost, lost)),
        Fact(
            "TV", lambda row: number(row.disagreement, 3),
            "mean total variation of the two distributions over all positions (greedy: at temperature 1)",
        ),
        Fact("entropy", lambda row: number(row.entropy, 3), "mean of the target's, nats"),
    ]  # fmt: skip
    return table(rows, facts if explained else [replace(fact, help="") for fact in facts], title)


def _kept(row: GroupRow) -> str:
    return "-" if row.share is None else f"{row.share.value:.2f} ({row.kept} of {row.tested})"


def _confusions(result: ExplainResult) -> Iterator[Block]:
    if result.confusions:
        yield Table(
            (Column("draft", "left"), Column("text", "left"), Column("times")),
            [[repr(pair.draft), repr(pair.text), str(pair.count)] for pair in result.confusions],
            title="The commonest rejections: what was drafted, and what the text has",
        )


def _costliest(result: ExplainResult) -> Iterator[Block]:
    """Rejections one by one, with what stood before them."""
    rows = costliest(result.texts, MAX_REJECTIONS)
    if rows:
        yield Table(
            (
                Column("before", "left"), Column("draft", "left"), Column("text", "left"), Column("kind", "left"),
                Column("kept before", help="draft tokens kept before it in its step"),
                Column("p draft", help="the target's probability of the draft token; 'p text': of the token that stands there; "
                       "'q': the draft's"),
                Column("q draft"), Column("p text"), Column("rank in p", help="of the draft token, 1 = likeliest"),
                Column("entropy", help="of p and of q, nats"), Column("lost", help="tokens, luck left out"),
            ),
            rows, title="The costliest rejections",
        )  # fmt: skip


def _counterfactuals(result: ExplainResult) -> Iterator[Block]:
    if not result.counterfactuals:
        return
    yield Heading("What other choices would have given")
    yield Paragraph("Replayed from the recording, no model was run.")
    best = max(
        (index for index, one in enumerate(result.counterfactuals) if one.tokens_per_s and one.family != "temperature"),
        key=lambda index: result.counterfactuals[index].tokens_per_s or 0.0, default=None,
    )  # fmt: skip
    facts: list[Fact[Counterfactual]] = [
        Fact("choice", lambda one: one.name + (" (this run)" if one.current else ""), align="left"),
        Fact("tokens per step", lambda one: number(one.tokens_per_step)),
        Fact("tokens/s", lambda one: number(one.tokens_per_s, 1), "estimated from the times of this run"),
        Fact("certainty", lambda one: "exact steps" if one.exact else "expectation", align="left"),
    ]
    now = f"This run: {number(result.tau.value)} tokens per step"
    speed = "" if result.tokens_per_s is None else f", {number(result.tokens_per_s, 1)} tokens/s"
    yield table(result.counterfactuals, facts, f"{now}{speed}", frozenset() if best is None else frozenset([best]))
    methods = dict.fromkeys((one.family, one.method, one.limits) for one in result.counterfactuals)
    yield Bullets([f"{family}: {method}; {limits}" for family, method, limits in methods])


def _texts(result: ExplainResult) -> Iterator[Block]:
    if not result.texts:
        return
    yield Heading("The texts")
    yield Paragraph(
        "Point at a token, or tap it, for its numbers: p is the target, q the draft. "
        + ("Greedy decoding keeps what both models like best; p and q are shown at temperature 1. " if result.is_greedy else "")
        + "'chance' is the probability that a draft token was kept, before it was drawn."
    )
    for text in result.texts:
        yield MarkedTokens(_text_title(text.id, text.task), token_text(text))


def _text_title(name: str, task: str) -> str:
    return f"{name} ({task})" if name and task not in ("", "other") else name or "Text"


def _circumstances(result: ExplainResult) -> Iterator[Block]:
    yield Heading("How it was found")
    items = [
        f"{counted(result.emitted, 'token')} in {counted(result.steps, 'step')}, {counted(result.drafted, 'draft token')}, "
        f"{result.tested} tested, "
        f"{result.accepted} accepted; verifier {result.verifier}; "
        + ", ".join(f"{name} {value}" for name, value in result.sampling.items()),
        "distributions come from one more pass of each model over the finished text; the step that tested a token saw the "
        "same text before it" if result.has_draft_probs else
        "the drafter copies: its tokens are placed, not drawn, and have no distribution; a placed token is kept with the "
        "probability that the target gives it",
    ]  # fmt: skip
    if result.times is not None:
        times = result.times
        items.append(
            f"a step took {times.step_s * 1e3:.2f} ms, {times.draft_s * 1e3:.2f} ms of it drafting "
            f"(mean of {counted(times.steps, 'step')}; each text's first one, which reads the prompt, left out)"
        )
    items += [_sentence(note) for note in result.notes]
    if result.command:
        items.append(f"command: {result.command}")
    yield Bullets(items)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


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
