"""One verdict for a batch whose rows may be verified by different rules (`Row.verifier`), each as
if it were alone.

Rows that share a rule are verified together. A row's verdict is a function of that row only, to the
bit, so it must not depend on how its neighbours' drafts are stored. A row in which nothing was
drawn is verified as a deterministic draft, and a row whose tree is a chain as a chain, even if the
batch's tensors allow more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.rows import Rows, RowVerifier
from outrider.sampling.distribution import adjusted_scores, distribution, greedy_choice
from outrider.sampling.rng import KeyedStreams
from outrider.types import Draft, Verdict, VerdictLists
from outrider.verifiers.fast import FastVerdicts
from outrider.verifiers.greedy import greedy_verdict
from outrider.verifiers.traversal import TraversalVerifier

ANY_RULE = TraversalVerifier()  # one that takes chains and trees, for rows on which all rules agree


@dataclass(frozen=True)
class _Kind:
    """The properties that rows must share to be verified in one call."""

    rule: RowVerifier
    is_tree: bool
    is_drawn: bool

    def form(self, draft: Draft) -> Draft:
        """The draft without what these rows do not need."""
        if self.is_tree == (draft.parents is not None) and self.is_drawn == (
            draft.probs is not None
        ):
            return draft
        return Draft(
            draft.tokens,
            draft.lengths,
            draft.parents if self.is_tree else None,
            draft.probs if self.is_drawn else None,
            draft.sampled if self.is_drawn else None,
            draft.replacement,
        )


def batch_verdict(
    logits: Tensor,
    draft: Draft,
    rows: Rows,
    default: RowVerifier,
    kernels: FastVerdicts | None = None,
) -> Verdict:
    """The verdict on a draft, from the target's logits (B, N+1, V); `default` verifies the rows
    that name no rule. `kernels` are given where the target runs on them. If all rows have the same
    kind of rule, one call decides them; otherwise kernels compute the distributions.

    Raises NumericalError when a distribution is invalid, CapabilityError when a row's rule does not
    take the row's tree.
    """
    rules = [row.verifier or default for row in rows]
    sampling = rows.sampling
    # the same verdict by any rule
    is_greedy = sampling.is_greedy and all(rule.lossless for rule in rules)
    if kernels is not None and (alike := (ANY_RULE, draft) if is_greedy else _alike(rules, draft)):
        scores = adjusted_scores(logits, sampling, rows.history, draft)
        if kernels.serve(*alike, scores):
            verdict = kernels.verdict(*alike, scores, rows.rng, rows.starts, sampling.options)
            if verdict is not None:
                return verdict  # else the reference says what is wrong
    if is_greedy:
        return greedy_verdict(draft, greedy_choice(logits, sampling, rows.history, draft))
    probs = distribution(
        logits, sampling, rows.history, draft, kernel=None if kernels is None else kernels.probs
    )
    return verdict_by_rule(rules, draft, probs, rows.rng, rows.starts, kernels)


def verdict_by_rule(
    rules: list[RowVerifier],
    draft: Draft,
    target_probs: Tensor,
    rng: KeyedStreams,
    starts: list[int],
    kernels: FastVerdicts | None = None,
) -> Verdict:
    """`Verifier.verify` with one rule per row; its arguments, positions as a list."""
    if alike := _alike(rules, draft):
        return _verified(*alike, target_probs, rng, starts, kernels)
    groups = _groups(rules, draft)
    verdicts = []
    for kind, members in groups.items():
        part = kind.form(_select(draft, members))
        wanted = target_probs[members, : part.num_nodes + 1]
        row_starts = [starts[row] for row in members]
        verdicts.append(
            _verified(kind.rule, part, wanted, rng.select(members), row_starts, kernels).lists
        )
    return _merged(list(groups.values()), verdicts, draft)


def _alike(rules: list[RowVerifier], draft: Draft) -> tuple[RowVerifier, Draft] | None:
    """The rule and the form of draft that do for all rows; None where there are several."""
    # without looking
    if draft.parents is None and draft.sampled is None and all(rule is rules[0] for rule in rules):
        return rules[0], draft
    groups = _groups(rules, draft)
    if len(groups) > 1:
        return None
    (kind,) = groups
    return kind.rule, kind.form(draft)


def _verified(
    rule: RowVerifier,
    draft: Draft,
    target_probs: Tensor,
    rng: KeyedStreams,
    starts: list[int],
    kernels: FastVerdicts | None,
) -> Verdict:
    if kernels is not None and kernels.serve(rule, draft, target_probs):
        verdict = kernels.verdict(rule, draft, target_probs, rng, starts)
        if verdict is not None:
            return verdict
    return rule.verify(draft, target_probs, rng, torch.tensor(starts, device=target_probs.device))


def _groups(rules: list[RowVerifier], draft: Draft) -> dict[_Kind, list[int]]:
    """Rows that are verified together, in the batch's order."""
    trees = _trees(draft)
    drawn = _drawn(draft)
    groups: dict[_Kind, list[int]] = {}
    for row, kind in enumerate(map(_Kind, rules, trees, drawn)):
        groups.setdefault(kind, []).append(row)
    return groups


def _trees(draft: Draft) -> list[bool]:
    """Whether each row branches anywhere."""
    if draft.parents is None:
        return [False] * draft.num_rows
    lines = zip(draft.parent_lists, draft.lists[1], strict=True)
    return [parents[:length] != list(range(-1, length - 1)) for parents, length in lines]


def _drawn(draft: Draft) -> list[bool]:
    """Whether anything in each row was drawn."""
    if draft.probs is None or draft.sampled is None:
        return [draft.probs is not None] * draft.num_rows
    lines = zip(draft.sampled.tolist(), draft.lists[1], strict=True)
    return [any(line[:length]) for line, length in lines]


def _select(draft: Draft, rows: list[int]) -> Draft:
    """Some rows of a draft, as wide as the longest of them."""
    width = max(draft.lists[1][row] for row in rows)
    return Draft(
        draft.tokens[rows, :width],
        draft.lengths[rows],
        None if draft.parents is None else draft.parents[rows, :width],
        None if draft.probs is None else draft.probs[rows, : width + 1],
        None if draft.sampled is None else draft.sampled[rows, :width],
        draft.replacement,
    )


def _merged(groups: list[list[int]], verdicts: list[VerdictLists], draft: Draft) -> Verdict:
    """The groups' verdicts as one, in the batch's order."""
    by_row: dict[int, tuple[list[int], int, int, bool]] = {}
    for members, lists in zip(groups, verdicts, strict=True):
        by_row.update(zip(members, zip(*lists, strict=True), strict=True))
    paths, *rest = zip(*(by_row[row] for row in range(draft.num_rows)), strict=True)
    padded = [path + [-1] * (draft.num_nodes - len(path)) for path in paths]
    return Verdict.of_lists(
        VerdictLists(padded, *map(list, rest)), draft.num_nodes, draft.tokens.device
    )
