"""What to do about it: rules with thresholds, each with its evidence in numbers."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.lab.explain.explain_result import Advice, ExplainResult

NOTABLE = 0.05  # share of the tokens emitted from which a cause is named
GOOD_ALPHA = 0.7  # accepted / tested from which acceptance is not the problem
MUCH_DRAFTING = 0.4  # share of a step's time
CONCENTRATED = 1.4  # share of the losses over share of the tokens: a kind of text stands out
SHARE_OF_LOSS = 0.1
NEAR_MISS = 0.3  # share of rejections that are near misses
MIN_TESTS = 200
DISTURBED = 0.1  # share of the processors
PLURALS = {"tool call": "tool calls", "number": "numbers", "name": "names", "word": "words"}


def advise(result: ExplainResult) -> list[Advice]:
    """At least one line."""
    rules = (
        _plain,
        _length,
        _shorter,
        _drafting_costs,
        _distil,
        _vocabulary,
        _stopped,
        _tree_budget,
        _branch,
        _filters,
    )
    lines = [line for rule in rules for line in rule(result)]
    if not lines:
        alpha = _alpha(result)
        kept = "" if alpha is None else f", {alpha:.0%} of tested draft tokens kept"
        evidence = (
            f"{result.tau.value:.2f} tokens a step{kept}; no cause costs {NOTABLE:.0%} of the tokens "
            "in a way that a setting would change."
        )
        lines = [Advice(title="Nothing stands out", evidence=evidence, tone="good")]
    return [*lines, *_cautions(result)]


def _lost(result: ExplainResult, cause: str) -> float:
    """Tokens."""
    return next(row.tokens for row in result.causes if row.cause == cause)


def _share(result: ExplainResult, cause: str) -> float:
    """The share of the emitted tokens that a cause cost."""
    return _lost(result, cause) / max(1, result.emitted)


def _alpha(result: ExplainResult) -> float | None:
    """Accepted / tested."""
    return result.accepted / result.tested if result.tested else None


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
        "takes "
        f"{times.rest_s * 1e3:.2f} ms at most. Confirm with 'outrider bench'.",
    )


def _length(result: ExplainResult) -> Iterator[Advice]:
    share = _share(result, "length")
    if share >= NOTABLE and result.is_chain and not any(_plain(result)):
        yield Advice(
            title="Longer drafts may pay: more --num-draft-tokens, or auto",
            tone="good",
            evidence=f"where a draft was kept whole, one more token would have brought "
            f"{_lost(result, 'length'):.0f} tokens ({share:.0%} of those emitted), before its "
            "price. "
            "'outrider tune' measures which length is fastest.",
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
            "drafting one "
            f"takes {result.times.draft_level_s / result.times.step_s:.0%} of a step. 'outrider "
            "tune' "
            "measures which length is fastest.",
        )


def _drafting_costs(result: ExplainResult) -> Iterator[Advice]:
    alpha = _alpha(result)
    times = result.times
    if times is None or alpha is None or not result.has_draft_probs:
        return
    share = times.draft_s / times.step_s
    if alpha >= GOOD_ALPHA and share >= MUCH_DRAFTING:
        yield Advice(
            title="Acceptance is fine: the cost of drafting is the problem",
            tone="caution",
            evidence=f"{alpha:.0%} of tested draft tokens are kept, but drafting takes "
            f"{share:.0%} of a "
            f"step ({times.draft_level_s * 1e3:.2f} ms a level against {times.rest_s * 1e3:.2f} "
            "ms for "
            "everything else). A smaller or quantised draft, --runtime native, or fewer tokens "
            "help; a better draft does not.",
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


def _vocabulary(result: ExplainResult) -> Iterator[Advice]:
    share = _share(result, "vocabulary")
    if share >= NOTABLE:
        yield Advice(
            title="The draft's vocabulary lacks words that this traffic needs",
            tone="caution",
            evidence=f"{_lost(result, 'vocabulary'):.0f} tokens were lost to words that the draft "
            "can "
            f"never say ({share:.0%} of those emitted). Use a draft with the target's vocabulary, "
            "or "
            "choose the reduced vocabulary from texts like these.",
        )


def _stopped(result: ExplainResult) -> Iterator[Advice]:
    share = _share(result, "stopped")
    lost = _lost(result, "stopped")
    if share < NOTABLE:
        return
    if result.has_draft_probs:
        yield Advice(
            title="The stop rule stops too early: lower stop_below, or stop=none",
            tone="good",
            evidence=f"{lost:.0f} of the tokens that it did not draft would have been kept "
            f"({share:.0%} of those emitted).",
        )
    else:
        yield Advice(
            title="There is often nothing to copy: add a drafter that always has a guess",
            evidence=f"steps in which less was proposed than asked for lost up to {lost:.0f} "
            "tokens "
            f"({share:.0%} of those emitted): add a draft model (--drafter composite), or look up "
            "in "
            "more text (suffix with a memory, retrieval with a corpus).",
        )


def _tree_budget(result: ExplainResult) -> Iterator[Advice]:
    share = _share(result, "tree-budget")
    if share >= NOTABLE:
        yield Advice(
            title="A larger tree: more --num-draft-tokens",
            evidence="the draft's next favourite, or leaves as deep as the deepest, would have "
            "kept "
            f"{_lost(result, 'tree-budget'):.0f} tokens more ({share:.0%} of those emitted), "
            "before "
            "the price of drafting and scoring them.",
        )


def _branch(result: ExplainResult) -> Iterator[Advice]:
    """Chains whose wrong token was a near miss."""
    rejections = result.tested - result.accepted
    if not (result.is_chain and result.has_draft_probs and rejections):
        return
    near = result.near_misses / rejections
    if near >= NEAR_MISS and _share(result, "draft") >= NOTABLE:
        yield Advice(
            title="Let the draft branch: tree=best-first",
            evidence=f"in {near:.0%} of the rejections the text's token was the draft's second to "
            "eighth "
            "guess. A tree has room for several; it pays where a wider target pass is cheap. "
            "Measure "
            "with 'outrider bench'.",
        )


def _filters(result: ExplainResult) -> Iterator[Advice]:
    if _share(result, "filters") >= NOTABLE:
        yield Advice(
            title="The filters (top-k, top-p, min-p) set target and draft apart",
            evidence=f"they cut different tokens from the two distributions, which lost "
            f"{_lost(result, 'filters'):.0f} tokens. A wider filter loses less.",
        )


def _cautions(result: ExplainResult) -> Iterator[Advice]:
    if result.other_cpu > DISTURBED:
        yield Advice(
            title="Doubt the times",
            tone="caution",
            evidence=f"other programs used up to {result.other_cpu:.0%} of the processors "
            "meanwhile, so "
            "every gain in tokens/s above is rough; tokens a step are not touched by it. Repeat "
            "on a "
            "quiet machine.",
        )
    if result.tested < MIN_TESTS:
        yield Advice(
            title="Few tests",
            tone="caution",
            evidence=f"{result.tested} draft tokens were tested: take the numbers above as hints, "
            "and "
            "more prompts for decisions.",
        )
