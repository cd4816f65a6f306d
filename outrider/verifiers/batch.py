"""One verdict for a batch whose rows may be verified by different rules (`Row.verifier`), each as if it were alone.

Rows that share a rule are verified together. A row's verdict is a function of that row only, to the bit, so it must not
matter how its neighbours' drafts are written down: a row in which nothing was drawn is verified as a deterministic draft,
and one whose tree is a chain as a chain, although the tensors of the batch say more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.rows import Rows, RowVerifier
from outrider.sampling.distribution import distribution, greedy_choice
from outrider.sampling.rng import KeyedStreams
from outrider.types import Draft, Verdict, VerdictLists
from outrider.verifiers.greedy import greedy_verdict
from outrider.verifiers.kernels import Kernels


@dataclass(frozen=True)
class _Kind:
    """What rows must have in common to be verified in one call."""

    rule: RowVerifier
    is_tree: bool
    is_drawn: bool

    def form(self, draft: Draft) -> Draft:
        """The same draft, without what these rows do not need."""
        if self.is_tree == (draft.parents is not None) and self.is_drawn == (draft.probs is not None):
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
    logits: Tensor, draft: Draft, rows: Rows, default: RowVerifier, kernels: Kernels | None = None
) -> Verdict:
    """The verdict on a draft, from the target's logits (B, N+1, V); `default` verifies the rows that name no rule. `kernels`:
    where the target runs on them; then laws and most verdicts are made by them, too.

    Raises NumericalError when a law is none, CapabilityError when a row's rule does not take the row's tree.
    """
    rules = [row.verifier or default for row in rows]
    if rows.sampling.is_greedy and all(rule.lossless for rule in rules):  # the same verdict, without laws
        return greedy_verdict(draft, greedy_choice(logits, rows.sampling, rows.history, draft))
    probs = distribution(logits, rows.sampling, rows.history, draft, kernel=None if kernels is None else kernels.laws)
    return verdict_by_rule(rules, draft, probs, rows.rng, rows.starts, kernels)


def verdict_by_rule(
    rules: list[RowVerifier], draft: Draft, target_probs: Tensor, rng: KeyedStreams, starts: list[int],
    kernels: Kernels | None = None,
) -> Verdict:  # fmt: skip
    """`Verifier.verify` with one rule per row; its arguments, positions as a list."""
    if draft.parents is None and draft.sampled is None and all(rule is rules[0] for rule in rules):  # alike without looking
        return _verified(rules[0], draft, target_probs, rng, starts, kernels)
    groups = _groups(rules, draft)
    if len(groups) == 1:
        (kind,) = groups
        return _verified(kind.rule, kind.form(draft), target_probs, rng, starts, kernels)
    verdicts = []
    for kind, members in groups.items():
        part = kind.form(_select(draft, members))
        wanted = target_probs[members, : part.num_nodes + 1]
        own = [starts[row] for row in members]
        verdicts.append(_verified(kind.rule, part, wanted, rng.select(members), own, kernels).lists)
    return _merged(list(groups.values()), verdicts, draft)


def _verified(
    rule: RowVerifier, draft: Draft, target_probs: Tensor, rng: KeyedStreams, starts: list[int], kernels: Kernels | None
) -> Verdict:
    if kernels is not None and kernels.serve(rule, draft, target_probs):
        return kernels.verdict(rule, draft, target_probs, rng, starts)
    return rule.verify(draft, target_probs, rng, torch.tensor(starts, device=target_probs.device))


def _groups(rules: list[RowVerifier], draft: Draft) -> dict[_Kind, list[int]]:
    """Rows that are verified together, in the batch's order."""
    trees, drawn = _trees(draft), _drawn(draft)
    groups: dict[_Kind, list[int]] = {}
    for row, kind in enumerate(map(_Kind, rules, trees, drawn)):
        groups.setdefault(kind, []).append(row)
    return groups


def _trees(draft: Draft) -> list[bool]:
    """Of every row, whether it branches anywhere."""
    if draft.parents is None:
        return [False] * draft.num_rows
    lines = zip(draft.parent_lists, draft.lists[1], strict=True)
    return [parents[:length] != list(range(-1, length - 1)) for parents, length in lines]


def _drawn(draft: Draft) -> list[bool]:
    """Of every row, whether anything in it was drawn."""
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
    return Verdict.of_lists(VerdictLists(padded, *map(list, rest)), draft.num_nodes, draft.tokens.device)
