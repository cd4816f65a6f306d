"""What to do about it: rules with thresholds, each with its evidence in numbers. The largest gain comes first."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.lab.explain.causes import CAUSES, DRAFT, FILTERS, LUCK, STOPPED, TREE_BUDGET, VERIFIER, VOCABULARY
from outrider.lab.explain.explain_result import Advice, Counterfactual, ExplainResult

WORTH = 0.03  # predicted gain in tokens/s from which a change is advised
NOTABLE = 0.05  # share of the tokens emitted from which a cause is named
GOOD_ALPHA = 0.7  # accepted / tested from which acceptance is not the problem
MUCH_DRAFTING = 0.4  # share of a step's time
CONCENTRATED = 1.4  # share of the losses over share of the tokens from which a kind of text stands out
SHARE_OF_LOSS = 0.1
NEAR_MISS = 0.3  # share of rejections in which the text's token was the draft's second to eighth guess
MUCH_LUCK = 2.0  # standard deviations
MIN_TESTS = 200
DISTURBED = 0.1  # share of the processors
PLURALS = {"tool call": "tool calls", "number": "numbers", "name": "names", "word": "words"}


def _lost(result: ExplainResult, cause: int) -> float:
    """Tokens."""
    return next(row.tokens for row in result.causes if row.cause == CAUSES[cause])


def _share(result: ExplainResult, cause: int) -> float:
    """The share of the emitted tokens that a cause cost."""
    return _lost(result, cause) / max(1, result.emitted)


def _alpha(result: ExplainResult) -> float | None:
    """Accepted / tested."""
    return result.accepted / result.tested if result.tested else None


def _present_rate(result: ExplainResult) -> float | None:
    """Tokens/s of the present chain as the same model of times sees it; else as measured."""
    current = next((one.tokens_per_s for one in result.counterfactuals if one.current), None)
    return current or result.tokens_per_s


def advise(result: ExplainResult) -> list[Advice]:
    """At least one line."""
    rules = (
        _plain, _length, _other_drafter, _drafting_costs, _distil, _vocabulary, _stop_rule, _tree_budget, _branch, _filters,
        _verifier, _temperature,
    )  # fmt: skip
    lines = [line for rule in rules for line in rule(result)]
    lines.sort(key=lambda line: -(line.gain or 0))
    if not lines:
        lines = [Advice(title="Nothing stands out", evidence=_evidence_of_rest(result), tone="good")]
    return [*lines, *_caution(result)]


def _chains(result: ExplainResult) -> list[Counterfactual]:
    return [one for one in result.counterfactuals if one.num_draft_tokens is not None and one.tokens_per_s is not None]


def _gain(result: ExplainResult, one: Counterfactual) -> float:
    """Relative to the present."""
    now = _present_rate(result)
    return 0.0 if one.tokens_per_s is None or not now else one.tokens_per_s / now - 1


def _plain_is_best(result: ExplainResult) -> bool:
    """Neither what ran nor a chain of any length is estimated to be as fast as no draft."""
    chains, now = _chains(result), _present_rate(result)
    if not chains or chains[0].num_draft_tokens != 0 or now is None:
        return False
    return max(now, *(one.tokens_per_s or 0 for one in chains)) <= (chains[0].tokens_per_s or 0)


def _plain(result: ExplainResult) -> Iterator[Advice]:
    if _plain_is_best(result):
        plain = _chains(result)[0]
        yield Advice(
            title="This draft does not pay: decode plainly", gain=_gain(result, plain), tone="bad",
            evidence=f"{result.tau.value:.2f} tokens a step do not pay for drafting: plain decoding is estimated at "
            f"{plain.tokens_per_s:.0f} tokens/s, no length looked at is faster. Confirm with 'outrider bench'.",
        )  # fmt: skip


def _length(result: ExplainResult) -> Iterator[Advice]:
    """Only where a chain of one drafter ran, whose length is a choice."""
    chains = [one for one in _chains(result) if one.num_draft_tokens]
    current = next((one for one in chains if one.current), None)
    if current is None or _plain_is_best(result):
        return
    best = max(chains, key=lambda one: one.tokens_per_s or 0)
    gain = _gain(result, best)
    if best is not current and gain >= WORTH:
        word = "Longer" if (best.num_draft_tokens or 0) > (current.num_draft_tokens or 0) else "Shorter"
        yield Advice(
            title=f"{word} drafts: --num-draft-tokens {best.num_draft_tokens}", gain=gain, tone="good",
            evidence=f"replayed on these texts, chains of {best.num_draft_tokens} give {best.tokens_per_step:.2f} tokens a step "
            f"(now {current.tokens_per_step:.2f}); with the times of this run that is {gain:+.0%} tokens/s.",
        )  # fmt: skip


def _other_drafter(result: ExplainResult) -> Iterator[Advice]:
    others = [one for one in result.counterfactuals if one.family == "drafter" and one.tokens_per_s]
    if not others:
        return
    best = max(others, key=lambda one: one.tokens_per_s or 0)
    gain = _gain(result, best)
    if gain >= WORTH:
        yield Advice(
            title=f"Another drafter: --{best.name}", gain=gain, tone="good",
            evidence=f"replayed on these texts it gives {best.tokens_per_step:.2f} tokens a step and costs next to nothing to "
            f"run: {gain:+.0%} tokens/s with the times of this run.",
        )  # fmt: skip


def _drafting_costs(result: ExplainResult) -> Iterator[Advice]:
    alpha, times = _alpha(result), result.times
    if times is None or alpha is None or not result.has_draft_probs:
        return
    share = times.draft_s / times.step_s
    if alpha >= GOOD_ALPHA and share >= MUCH_DRAFTING:
        yield Advice(
            title="Acceptance is fine: the cost of drafting is the problem", tone="caution",
            evidence=f"{alpha:.0%} of tested draft tokens are kept, but drafting takes {share:.0%} of a step "
            f"({times.draft_level_s * 1e3:.2f} ms a level against {times.rest_s * 1e3:.2f} ms for everything else). "
            "A smaller or quantised draft, --set runtime=native, or fewer tokens help; a better draft does not.",
        )  # fmt: skip


def _distil(result: ExplainResult) -> Iterator[Advice]:
    """Kinds of text that lose more than their share: what to train the draft on."""
    lost, tokens = sum(row.lost for row in result.by_kind), sum(row.tokens for row in result.by_kind)
    if not result.has_draft_probs or lost <= 0 or _share(result, DRAFT) < NOTABLE:
        return
    standing_out = [
        row for row in result.by_kind
        if row.lost / lost >= SHARE_OF_LOSS and row.lost / lost >= CONCENTRATED * row.tokens / tokens
    ]  # fmt: skip
    if standing_out:
        words = ", ".join(PLURALS.get(row.name, row.name) for row in standing_out)
        parts = "; ".join(
            f"{row.name}: {row.lost / lost:.0%} of the losses on {row.tokens / tokens:.0%} of the tokens" for row in standing_out
        )
        yield Advice(title=f"Distil the draft on these regions: {words}", evidence=parts + ".", tone="plain")


def _vocabulary(result: ExplainResult) -> Iterator[Advice]:
    if _share(result, VOCABULARY) >= NOTABLE:
        yield Advice(
            title="The draft's vocabulary lacks words that this traffic needs", tone="caution",
            evidence=f"{_lost(result, VOCABULARY):.0f} tokens were lost to words that the draft can never say "
            f"({_share(result, VOCABULARY):.0%} of those emitted). Use a draft with the target's vocabulary, or choose the "
            "reduced vocabulary from texts like these.",
        )  # fmt: skip


def _stop_rule(result: ExplainResult) -> Iterator[Advice]:
    if _share(result, STOPPED) < NOTABLE:
        return
    without = next((one for one in result.counterfactuals if one.family == "stop rule"), None)
    gain = None if without is None else _gain(result, without)
    if result.has_draft_probs and (gain is None or gain >= WORTH):
        yield Advice(
            title="The stop rule stops too early: lower stop_below, or stop=none", gain=gain, tone="good",
            evidence=f"what it did not draft would have been kept {_lost(result, STOPPED):.0f} times.",
        )  # fmt: skip
    elif not result.has_draft_probs:
        yield Advice(
            title="There is often nothing to copy: add a drafter that always has a guess", tone="plain",
            evidence=f"steps in which less was proposed than asked for lost {_lost(result, STOPPED):.0f} tokens "
            f"({_share(result, STOPPED):.0%} of those emitted): a draft model beside it (--drafter composite), or lookup in more "
            "text (suffix with a memory, retrieval with a corpus).",
        )  # fmt: skip


def _tree_budget(result: ExplainResult) -> Iterator[Advice]:
    if _share(result, TREE_BUDGET) >= NOTABLE:
        yield Advice(
            title="A larger tree: more --num-draft-tokens", tone="plain",
            evidence=f"one more sibling, or leaves as deep as the deepest, would have kept {_lost(result, TREE_BUDGET):.0f} "
            f"tokens more ({_share(result, TREE_BUDGET):.0%} of those emitted), before the price of drafting and scoring them.",
        )  # fmt: skip


def _branch(result: ExplainResult) -> Iterator[Advice]:
    """Chains whose wrong token was a near miss."""
    total = sum(row.rejections for row in result.ranks)
    near = sum(row.rejections for row in result.ranks if row.rank in ("2", "3", "4-8"))
    if result.is_chain and result.has_draft_probs and total and near / total >= NEAR_MISS and _share(result, DRAFT) >= NOTABLE:
        yield Advice(
            title="Let the draft branch: --drafter-option tree=best-first", tone="plain",
            evidence=f"in {near / total:.0%} of the rejections the text's token was the draft's second to eighth guess. A tree "
            "has room for several; it pays where a wider target pass is cheap. Measure with 'outrider bench'.",
        )  # fmt: skip


def _filters(result: ExplainResult) -> Iterator[Advice]:
    if _share(result, FILTERS) >= NOTABLE:
        yield Advice(
            title="The filters (top-k, top-p, min-p) set target and draft apart", tone="plain",
            evidence=f"with them {_lost(result, FILTERS):.0f} tokens fewer are kept than without: they cut different tokens from "
            "the two distributions. A wider filter loses less.",
        )  # fmt: skip


def _verifier(result: ExplainResult) -> Iterator[Advice]:
    if _share(result, VERIFIER) < WORTH:
        return
    better = {"token": "block", "multi-round": "traversal"}.get(result.verifier)
    text = f"{_lost(result, VERIFIER):.0f} tokens ({_share(result, VERIFIER):.0%} of those emitted) a better rule would keep."
    if better is not None:
        yield Advice(title=f"A better verifier: --verifier {better}", evidence=text, gain=_share(result, VERIFIER), tone="good")
    elif result.verifier == "gumbel":
        yield Advice(
            title="Drafter-invariance has a price: --verifier block or traversal keeps more", evidence=text,
            gain=_share(result, VERIFIER), tone="plain",
        )  # fmt: skip
    else:
        yield Advice(title="The verifier is not the best possible for siblings that are drawn", evidence=text, tone="plain")


def _temperature(result: ExplainResult) -> Iterator[Advice]:
    cold = next((one for one in result.counterfactuals if one.family == "temperature"), None)
    if cold is not None and not result.is_greedy and _gain(result, cold) >= 2 * WORTH and _share(result, DRAFT) >= NOTABLE:
        yield Advice(
            title="Much of the disagreement is temperature", tone="plain",
            evidence=f"greedy, the two models agree on {cold.tokens_per_step:.2f} tokens a step at these positions (now "
            f"{result.tau.value:.2f}). A lower temperature speeds up; it also changes the texts.",
        )  # fmt: skip


def _caution(result: ExplainResult) -> Iterator[Advice]:
    luck = next(row for row in result.causes if row.cause == CAUSES[LUCK])
    if luck.spread and abs(luck.tokens) > MUCH_LUCK * luck.spread:
        word = "bad" if luck.tokens > 0 else "good"
        yield Advice(
            title=f"This run had {word} luck", tone="caution",
            evidence=f"{abs(luck.tokens):.0f} tokens {'fewer' if luck.tokens > 0 else 'more'} than its distributions promise (a "
            f"standard deviation is {luck.spread:.0f}): another seed would differ.",
        )  # fmt: skip
    if result.other_cpu > DISTURBED:
        yield Advice(
            title="Doubt the times", tone="caution",
            evidence=f"other programs used up to {result.other_cpu:.0%} of the processors meanwhile, so every gain in tokens/s "
            "above is rough; tokens a step are not touched by it. Repeat on a quiet machine.",
        )  # fmt: skip
    if result.tested < MIN_TESTS:
        yield Advice(
            title="Few tests", tone="caution",
            evidence=f"{result.tested} draft tokens were tested: take the numbers above as hints, more prompts for decisions.",
        )  # fmt: skip


def _evidence_of_rest(result: ExplainResult) -> str:
    alpha = "" if _alpha(result) is None else f", {_alpha(result):.0%} of tested draft tokens kept"
    return f"{result.tau.value:.2f} tokens a step{alpha}; no change that was looked at promises {WORTH:.0%} or more."
