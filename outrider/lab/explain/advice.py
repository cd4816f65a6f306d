"""Advice from the causes: rules with thresholds, each with its evidence in numbers."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.lab.explain.explain_result import Advice, ExplainResult, Tone

NOTABLE = 0.05  # share of the tokens emitted from which a cause is named
CONCENTRATED = 1.4  # share of the losses over share of the tokens: a kind of text stands out
SHARE_OF_LOSS = 0.1
MIN_TESTS = 200
DISTURBED = 0.1  # share of the processors
PLURALS = {"tool call": "tool calls", "number": "numbers", "name": "names", "word": "words"}


# cause -> title, what to say about this many tokens, tone. `stopped` depends on the drafter
BY_CAUSE: dict[str, tuple[str, str, Tone]] = {
    "vocabulary": (
        "The draft's vocabulary lacks words that this traffic needs",
        "went to words that the draft can never say: use a draft with the target's vocabulary, or "
        "choose the reduced vocabulary from texts like these",
        "caution",
    ),
    "stop rule": (
        "The stop rule stops too early: lower stop_below, or stop=none",
        "were not drafted and would have been kept",
        "good",
    ),
    "copies": (
        "There is often nothing to copy: add a drafter that always has a guess",
        "at most, where less was proposed than asked for: add a draft model (--drafter composite), "
        "or look up in more text (suffix with a memory, retrieval with a corpus)",
        "plain",
    ),
    "tree-budget": (
        "A larger tree: more --num-draft-tokens",
        "would have been kept of the draft's next favourites, or of leaves as deep as the deepest, "
        "before the price of drafting and scoring them",
        "plain",
    ),
    "filters": (
        "The filters (top-k, top-p, min-p) set target and draft apart",
        "went to tokens that they cut from one of the two distributions: a wider filter loses less",
        "plain",
    ),
    "length": (
        "Longer drafts may pay: more --num-draft-tokens, or auto",
        "would have followed drafts that were kept whole, before their price; 'outrider tune' "
        "measures which length is fastest",
        "good",
    ),
}


def advise(result: ExplainResult) -> list[Advice]:
    """At least one line."""
    rules = (_plain, _shorter, _distil, _causes)
    lines = [line for rule in rules for line in rule(result)]
    if not lines:
        kept_text = (
            f", {result.accepted / result.tested:.0%} of tested draft tokens kept"
            if result.tested
            else ""
        )
        evidence = (
            f"{result.tau.value:.2f} tokens a step{kept_text}; no cause costs {NOTABLE:.0%} of the tokens "
            "in a way that a setting would change."
        )
        lines = [Advice(title="Nothing stands out", evidence=evidence, tone="good")]
    return [*lines, *_cautions(result)]


def _causes(result: ExplainResult) -> Iterator[Advice]:
    for row in result.causes:
        share = _share(result, row.cause)
        if share < NOTABLE or (
            row.cause == "length" and not (result.is_chain and not any(_plain(result)))
        ):
            continue
        stopped = "stop rule" if result.has_draft_probs else "copies"
        words = BY_CAUSE.get(stopped if row.cause == "stopped" else row.cause)
        if words is not None:
            title, what, tone = words
            evidence = f"{row.tokens:.0f} tokens ({share:.0%} of those emitted) {what}."
            yield Advice(title=title, evidence=evidence, tone=tone)


def _share(result: ExplainResult, cause: str) -> float:
    """The share of the emitted tokens that a cause cost."""
    lost = next(row.tokens for row in result.causes if row.cause == cause)
    return lost / max(1, result.emitted)


def _plain(result: ExplainResult) -> Iterator[Advice]:
    """A step without drafting takes less than the rest of a step with it: that alone decides where
    drafts lose."""
    times = result.times
    if times is None or result.tau.value * times.rest_s > times.step_s:
        return
    yield Advice(
        title="This draft does not pay: decode plainly",
        tone="bad",
        evidence=f"{result.tau.value:.2f} tokens a step take {times.step_s * 1e3:.2f} ms, of which "
        f"{times.draft_s * 1e3:.2f} ms are drafting: without it a step, which gives one token, "
        f"takes {times.rest_s * 1e3:.2f} ms at most. Confirm with 'outrider bench'.",
    )


def _shorter(result: ExplainResult) -> Iterator[Advice]:
    """The last token that a model drafts in every step is not worth its time."""
    deepest = result.by_level[-1] if result.by_level else None
    if deepest is None or result.times is None or not (result.is_chain and result.has_draft_probs):
        return
    if result.num_draft_tokens.startswith("auto") or _share(result, "stopped") >= NOTABLE:
        return
    kept = deepest.kept / result.steps
    if kept * result.times.step_s < result.times.draft_level_s * result.tau.value:
        yield Advice(
            title="Shorter drafts: fewer --num-draft-tokens, or auto",
            evidence=f"draft token {deepest.level} is kept in {kept:.0%} of the steps, and "
            f"drafting one takes {result.times.draft_level_s / result.times.step_s:.0%} of a step. "
            "'outrider tune' measures which length is fastest.",
        )


def _distil(result: ExplainResult) -> Iterator[Advice]:
    """Kinds of text that lose more than their share: what to train the draft on."""
    lost = sum(row.lost for row in result.by_kind)
    tokens = sum(row.tokens for row in result.by_kind)
    if not result.has_draft_probs or lost <= 0 or _share(result, "draft") < NOTABLE:
        return
    rows = [
        row
        for row in result.by_kind
        if row.lost / lost >= max(SHARE_OF_LOSS, CONCENTRATED * row.tokens / tokens)
    ]
    if rows:
        words = ", ".join(PLURALS.get(row.name, row.name) for row in rows)
        parts = [
            f"{row.name}: {row.lost / lost:.0%} of the losses on {row.tokens / tokens:.0%} of the tokens"
            for row in rows
        ]
        title = f"Distil the draft on these regions: {words}"
        yield Advice(title=title, evidence=f"{'; '.join(parts)}.")


def _cautions(result: ExplainResult) -> Iterator[Advice]:
    if result.other_cpu > DISTURBED:
        yield Advice(
            title="The times are rough",
            tone="caution",
            evidence=f"other programs used up to {result.other_cpu:.0%} of the processors "
            "meanwhile, so every gain in tokens/s above is rough; tokens a step are not touched by "
            "it. Repeat on a quiet machine.",
        )
    if result.tested < MIN_TESTS:
        yield Advice(
            title="Few draft tokens were tested",
            tone="caution",
            evidence=f"{result.tested} of them: take the numbers above as hints, "
            "and more prompts for decisions.",
        )
