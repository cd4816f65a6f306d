"""Every token lost has a cause: parts add up to the last digit, luck is fair, and what is left of the gap is block verification.

The expectations are exact: every draft, every coin and every correction of one step is enumerated (`outrider/lab/certify`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.lab.certify.enumerate import emitted_tokens, enumerate_step, target_pass
from outrider.lab.certify.tables import Path as Tokens
from outrider.lab.certify.tables import Proposals, TableModel, sampled_drafts, shape, tree_drafts
from outrider.lab.explain.annotate import Annotated, annotate
from outrider.lab.explain.causes import (
    CAUSES,
    DRAFT,
    FILTERS,
    LENGTH,
    LUCK,
    STOPPED,
    TREE_BUDGET,
    VERIFIER,
    VOCABULARY,
    Drafting,
    Ledger,
    account,
    judge_of,
)
from outrider.lab.explain.distributions import Distributions, forced_distributions
from outrider.lab.explain.forecast import walk_of
from outrider.lab.runner import Step
from outrider.sampling.kept import Children
from outrider.sampling.params import SamplingParams
from outrider.sampling.rejection import acceptance
from outrider.sampling.rng import Purpose, Randomness
from outrider.types import Draft, Verdict
from outrider.verifiers import VERIFIERS
from outrider.verifiers.base import Verifier, chain_verdict
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.token import TokenVerifier
from tests.helpers import disturbed, tiny_llama
from tests.unit.lab.explain.pairs import PROMPTS, contender_of, finished, save_pair

V, DEPTH = 3, 4
OPEN = SamplingParams(temperature=1.0)


def tables(seed: int, params: SamplingParams = OPEN, draft_params: SamplingParams | None = None) -> tuple[TableModel, TableModel]:
    generator = torch.Generator().manual_seed(seed)
    target = TableModel.random(generator, V, DEPTH, params, [1])
    draft = TableModel.random(generator, V, DEPTH, draft_params or params, [1])
    for path, logits in draft.logits.items():  # neither alike nor strangers
        draft.logits[path] = 0.5 * logits + target.logits[path]
    return target, draft


def distributions_at(target: TableModel, draft: TableModel, path: Tokens, token: int) -> Distributions:
    p, q = target.probs(path).numpy(), draft.probs(path).numpy()
    return Distributions(token, False, p, q, p, q, None, int(p.argmax()), int(q.argmax()), None)


def outcomes(
    verifier: str | Verifier, target: TableModel, draft: TableModel, proposals: Proposals, *, is_tree: bool
) -> Iterator[tuple[float, Step, Ledger]]:
    """(probability, what was recorded, its account) of every outcome of one step."""
    judge = verifier if isinstance(verifier, Verifier) else VERIFIERS.load(verifier)()
    found = enumerate_step(judge.verify, proposals, target_pass(target, proposals))
    drafting = Drafting(judge, replacement=proposals.draft.replacement, draws=True)
    sampled = proposals.draft.is_sampled()
    lists = found.verdict.lists
    for row, (origin, text) in enumerate(zip(found.proposal.tolist(), emitted_tokens(found, proposals), strict=True)):
        if found.weights[row] == 0:
            continue
        length = proposals.draft.lists[1][origin]
        step = Step(
            0, length, proposals.draft.lists[0][origin][:length],
            proposals.draft.parent_lists[origin][:length] if is_tree else None, sampled[origin][:length].tolist(),
            lists.path[row][: lists.num_accepted[row]], lists.next_token[row], lists.all_accepted[row], len(text), 1, 0.0, 0.0,
        )  # fmt: skip
        distributions = [distributions_at(target, draft, text[:level], token) for level, token in enumerate(text)]
        yield float(found.weights[row]), step, account(step, distributions, 99, drafting)


def expected_parts(
    verifier: str | Verifier, proposals: Proposals, tables: tuple[TableModel, TableModel], *, is_tree: bool = False
) -> tuple[np.ndarray, float, float]:
    """Means over all outcomes: parts by cause, tokens, ideal."""
    total, tokens, ideal = np.zeros(len(CAUSES)), 0.0, 0.0
    for weight, step, one in outcomes(verifier, *tables, proposals, is_tree=is_tree):
        assert one.parts.sum() == pytest.approx(one.ideal - step.taken, abs=1e-9)
        total += weight * one.parts.sum(0)
        tokens += weight * step.taken
        ideal += weight * one.ideal
    return total, tokens, ideal


@pytest.mark.parametrize("kinds", ["sss", "sds", "dss"])
@pytest.mark.parametrize("verifier", ["token", "block", "multi-round", "traversal"])
@pytest.mark.parametrize("seed", [0, 1])
def test_chains(verifier: str, seed: int, kinds: str) -> None:
    """Luck is fair; what the verifier leaves behind is exactly what block verification would have kept more."""
    pair = tables(seed)
    proposals = sampled_drafts(pair[1], 3, kinds=kinds)
    parts, tokens, _ = expected_parts(verifier, proposals, pair)
    _, best, _ = expected_parts("block", proposals, pair)
    assert parts[LUCK] == pytest.approx(0, abs=1e-9)
    assert parts[VERIFIER] == pytest.approx(best - tokens, abs=1e-9)
    assert parts[DRAFT] == pytest.approx(4 - best, abs=1e-9)
    if verifier in ("token", "multi-round") and kinds == "sss":
        assert parts[VERIFIER] > 1e-3


class ReluctantVerifier(Verifier):
    """Somebody else's: lossless, and keeps a token half as often as it could. Says nothing of what it keeps."""

    name, lossless = "reluctant", True

    def verify(self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor) -> Verdict:
        heads = rng.bernoulli(acceptance(target_probs, draft) / 2, Purpose.ACCEPT, positions)
        num_accepted = heads.long().cumprod(dim=1).sum(dim=1)
        rows = torch.arange(draft.num_rows)
        assert draft.probs is not None
        p, q = target_probs[rows, num_accepted], draft.probs[rows, num_accepted]
        is_rejected = (num_accepted < draft.lengths)[:, None]
        weights = torch.where(is_rejected, p - torch.minimum(p, q) / 2, p)
        return chain_verdict(draft, num_accepted, rng.categorical(weights, Purpose.RESAMPLE, positions, 0))


def test_a_verifier_that_says_nothing_of_what_it_keeps() -> None:
    """It is simulated: luck is fair, and the gap of one token is what the best rule would have kept more."""
    pair = tables(0)
    for num_tokens in (1, 3):
        proposals = sampled_drafts(pair[1], num_tokens, kinds="s" * num_tokens)
        parts, tokens, _ = expected_parts(ReluctantVerifier(), proposals, pair)
        _, best, _ = expected_parts("token", proposals, pair)
        assert parts[LUCK] == pytest.approx(0, abs=0.1)
        assert parts[VERIFIER] > 0.2
        if num_tokens == 1:
            assert parts[VERIFIER] == pytest.approx(best - tokens, abs=0.05)


@pytest.mark.parametrize("verifier", ["token", "block", "multi-round", "traversal", "gumbel"])
@pytest.mark.parametrize("kinds", ["s", "d", "ss", "sd", "ds"])
def test_the_simulation_finds_what_formulas_say(verifier: str, kinds: str) -> None:
    """At the root, where nothing came before. Drafts that share the noise are not simulated."""
    judge: Verifier = VERIFIERS.load(verifier)()
    if (len(kinds) > 1 and judge.shape == "chain") or (judge.coupled and "s" in kinds):
        pytest.skip("not its drafts")
    p, q = np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.1, 0.3, 0.2, 0.4])
    children = Children([1, 3][: len(kinds)], [kind == "s" for kind in kinds])
    draws = q if "s" in kinds else None
    expected = judge.kept_share(p, draws, children, 1.0, seed=1)
    assert Verifier.kept_share(judge, p, draws, children, 1.0, seed=2) == pytest.approx(expected, abs=0.08)


TREES = {
    "one level, two drawn": ([-1, -1], "ss"),
    "two levels, two drawn": ([-1, -1, 1, 1], "ssss"),
    "placed": ([-1, -1, 0, 1], "dddd"),
    "drawn beside placed": ([-1, -1, 0, 1], "sdss"),
    "branch below": ([-1, 0, 0], "sss"),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("verifier", ["multi-round", "traversal"])
def test_trees(verifier: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.sampling.kept.DRAWS", 200)
    pair = tables(2)
    proposals = tree_drafts(pair[1], shape(*TREES[name]))
    parts, _, _ = expected_parts(verifier, proposals, pair, is_tree=True)
    assert parts[LUCK] == pytest.approx(0, abs=0.03 if TREES[name][1].count("s") > 1 else 1e-9)
    assert parts[VERIFIER] >= -0.02
    if "s" not in TREES[name][1]:
        assert parts[VERIFIER] == pytest.approx(0, abs=1e-9)


def test_a_single_level_of_two_drawn_children_has_the_gap_of_optimal_transport() -> None:
    """The rule keeps less than the linear programme allows, and the bound is met by no one here."""
    pair = tables(4)
    proposals = tree_drafts(pair[1], shape([-1, -1], "ss"))
    for verifier in ("multi-round", "traversal"):
        parts, tokens, _ = expected_parts(verifier, proposals, pair, is_tree=True)
        kept_best = 2 - (parts[DRAFT] + parts[TREE_BUDGET])
        assert kept_best >= tokens
        assert parts[VERIFIER] == pytest.approx(kept_best - tokens, abs=0.02)


def test_the_next_token_of_a_draft_kept_whole() -> None:
    """Length is charged what one more token would have brought: the overlap of the distributions behind the draft."""
    pair = tables(3)
    for weight, step, one in outcomes("token", *pair, sampled_drafts(pair[1], 2), is_tree=False):
        if step.complete and weight > 0:
            text = tuple(step.tokens)
            overlap = np.minimum(pair[0].probs(text).numpy(), pair[1].probs(text).numpy()).sum()
            assert one.parts[-1, LENGTH] == pytest.approx(overlap)
            assert one.ideal == pytest.approx(3 + overlap)


# ------------------------------------------------ real runs


def annotated(pair: tuple[str, str], configuration: str, params: SamplingParams, prompt: list[int] = PROMPTS[0]) -> Annotated:
    contender = contender_of(pair, configuration)
    trace = contender.run([prompt], params)[0]
    text = finished(contender, trace, params)
    decoder = contender.built.decoder
    drafting = Drafting(
        judge_of(decoder.verifier, is_greedy=params.is_greedy), replacement="parallel" in configuration,
        draws=not params.is_greedy,
    )  # fmt: skip
    return annotate(text, trace.steps, forced_distributions(decoder.target, decoder.drafter, text), drafting)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"))


GREEDY = SamplingParams(max_tokens=50)
WARM = SamplingParams(max_tokens=50, temperature=1.0, seed=3)
FILTERED = SamplingParams(max_tokens=50, temperature=1.0, top_p=0.8, seed=3)
RUNS = [
    ("draft-model k=4", GREEDY), ("draft-model k=4", WARM), ("draft-model k=4 verifier=token", FILTERED),
    ("draft-model k=5 stop=entropy stop_below=0.5", WARM), ("draft-model k=6 tree=2x2", GREEDY),
    ("draft-model k=6 tree=2x2", WARM), ("draft-model k=6 tree=parallel:2 verifier=multi-round", FILTERED),
    ("draft-model k=8 tree=best-first", GREEDY), ("draft-model k=4 verifier=gumbel", WARM), ("ngram k=4", WARM),
    ("suffix k=6", GREEDY), ("draft-model k=auto:4", WARM), ("composite k=6 parts=draft-model+suffix", WARM),
]  # fmt: skip


@pytest.mark.parametrize(("configuration", "params"), RUNS, ids=lambda value: value if isinstance(value, str) else "")
def test_parts_add_up(pair: tuple[str, str], configuration: str, params: SamplingParams) -> None:
    """Ideal less realised, to rounding, whatever drafts and verifies; splitting the ends changes no sum."""
    found = annotated(pair, configuration, params)
    ledger = found.ledger
    taken = sum(step.taken for step in found.steps)
    assert taken == len(found.text.output)
    assert ledger.parts.sum() == pytest.approx(ledger.ideal - taken, abs=1e-8)
    ledger.split_ends(lambda index, levels, weight, drawn: 0.25 * levels)
    assert ledger.parts.sum() == pytest.approx(ledger.ideal - taken, abs=1e-8)
    assert np.isfinite(ledger.parts).all()
    if params.is_greedy:
        np.testing.assert_allclose(ledger.parts[:, [LUCK, VERIFIER, FILTERS]], 0, atol=1e-9)


def test_greedy_expectation_is_the_outcome(pair: tuple[str, str]) -> None:
    ledger = annotated(pair, "draft-model k=4", GREEDY).ledger
    tested = ledger.kept >= 0
    np.testing.assert_array_equal(ledger.expected[tested], ledger.kept[tested])


# ------------------------------------------------ constructions with a known cause


def sums(found: Annotated) -> np.ndarray:
    return found.ledger.parts.sum(0)


def test_a_draft_that_is_the_target_loses_nothing(tmp_path: Path) -> None:
    """But for the length: one more token would always have been kept."""
    pair = save_pair(tmp_path, draft=disturbed(tiny_llama(257, sharpness=2.0), 0.0))
    for params in (GREEDY, WARM):
        found = annotated(pair, "draft-model k=3", params)
        parts = sums(found)
        np.testing.assert_allclose(np.delete(parts, LENGTH), 0, atol=1e-3)
        assert parts[LENGTH] == pytest.approx(len(found.steps) - 1, abs=0.01)  # the last step ends the text


def test_a_cut_vocabulary_is_named() -> None:
    """A draft that is the target but for the words it lacks: all that is lost is the mass on these."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    outside = np.array([False, True, False, True])
    q = np.where(outside, 0, p) / 0.6
    distributions = Distributions(1, False, p, q, p, q, outside, 0, 0, None)
    step = Step(0, 3, [2, 0, 0], None, [True] * 3, [], 1, False, 1, 1, 0.0, 0.0)
    parts = account(step, [distributions], 99, Drafting(BlockVerifier())).parts[0]
    assert parts[VOCABULARY] == pytest.approx(3 * 0.4)
    assert parts[DRAFT] == pytest.approx(0)
    assert parts[LUCK] == pytest.approx(3 * 0.6)


def test_words_that_a_narrow_draft_lacks(tmp_path: Path) -> None:
    """A greedy rejection is the vocabulary's exactly where the text's token is outside of it."""
    pair = save_pair(tmp_path, draft=tiny_llama(170, sharpness=2.0))
    found = annotated(pair, "draft-model k=3", GREEDY, [5, 80, 33, 7])
    rejected = (found.ledger.kept == 0) & (found.ledger.lost > 0)
    foreign = found.positions.token >= 170
    assert (rejected & foreign).any()
    np.testing.assert_array_equal(found.ledger.parts[:, VOCABULARY] > 0, rejected & foreign)
    np.testing.assert_array_equal(found.ledger.parts[:, DRAFT] > 0, rejected & ~foreign)


def test_a_stop_rule_is_named(pair: tuple[str, str]) -> None:
    """A threshold of 1 never lets it draft: every token lost goes to the stop, less what the draft would not have got."""
    found = annotated(pair, "draft-model k=4 stop=entropy stop_below=1.0", GREEDY)
    parts = sums(found)
    assert parts[STOPPED] == pytest.approx(found.ledger.ideal - len(found.text.output))
    assert np.count_nonzero(parts) == 1


def test_what_a_stop_cost_is_read_off_the_text_behind_it(pair: tuple[str, str]) -> None:
    """Split by the real walk: the stop's part of each early end is how many of the missing guesses would have been right."""
    params = SamplingParams(max_tokens=60)
    found = annotated(pair, "draft-model k=5 stop=entropy stop_below=0.7", params)
    walk = walk_of(found.positions, "guessed", params.max_tokens)
    found.ledger.split_ends(lambda at, levels, weight, drawn: sum(walk.survival(at, levels, weight)))
    right = found.positions.guess == found.positions.token
    assert len(found.ledger.ended) > 5
    expected = 0
    for position, ended in found.ledger.ended:
        run = right[position : position + ended.lost].tolist()
        expected += run.index(False) if False in run else len(run)
    parts = sums(found)
    assert parts[STOPPED] == expected > 0
    missing = sum(ended.lost for _, ended in found.ledger.ended)
    rejected = found.ledger.lost[found.ledger.kept == 0].sum()
    assert parts[DRAFT] == pytest.approx(missing - expected + rejected)


def test_a_tiny_tree_budget_is_named(tmp_path: Path) -> None:
    """One sibling more would have been it: exactly where the text's token is the draft's next favourite."""
    found = annotated(save_pair(tmp_path, noise=0.3), "draft-model k=2 tree=2", SamplingParams(max_tokens=80))
    rejected = (found.ledger.kept == 0) & (found.ledger.lost > 0)
    next_best = found.positions.rank_token == 3
    assert (rejected & next_best).any()
    np.testing.assert_array_equal(found.ledger.parts[:, TREE_BUDGET] > 0, rejected & next_best)


def test_a_path_that_ends_in_the_middle_of_a_tree() -> None:
    """The first child is a leaf, the second has a child: keeping the leaf loses the level that the tree has elsewhere."""
    p = np.array([0.0, 1.0, 0.0])
    distributions = [Distributions(1, True, p, p, p, p, None, 1, 1, 1), Distributions(2, True, p, p, p, p, None, 1, 1, 1)]
    step = Step(0, 3, [1, 0, 2], [-1, -1, 1], None, [0], 2, True, 2, 1, 0.0, 0.0)
    one = account(step, distributions, 99, Drafting(TokenVerifier()))
    assert one.ideal == 3
    assert one.parts[1, TREE_BUDGET] == pytest.approx(1)
    assert one.parts.sum() == pytest.approx(1)


def test_filters_are_named(pair: tuple[str, str]) -> None:
    """Without filters their part is exactly 0, with them it is not."""
    assert sums(annotated(pair, "draft-model k=4", WARM))[FILTERS] == 0
    assert sums(annotated(pair, "draft-model k=4", FILTERED))[FILTERS] != 0
