"""The oracle of exact distributions: the enumerators of tests/enumeration/, under the names that
tests use.

A lossless verifier gives the target's joint distribution, to rounding (TV < 1e-12 in fp64); the
smallest bias of section 2 of the shared algorithms page is 0.01, so nothing in between is left to
argue about.

Not covered: the keyed generator itself (tests/unit/sampling/test_rng.py), the Gumbel-max theorem
(by integration in tests/unit/sampling/test_coupling.py).
"""

from __future__ import annotations

from tests.enumeration.enumerate import (
    Enumeration,
    NeedsOutcomesError,
    Outcomes,
    UnsoundError,
    Verify,
    bias,
    emitted_tokens,
    enumerate_step,
    select_rows,
    step_joint,
    target_pass,
)
from tests.enumeration.intervals import Interval, IntervalRandomness, Key, interval_joint
from tests.enumeration.tables import (
    Joint,
    Path,
    Proposals,
    Stop,
    TableModel,
    chain,
    continued,
    fixed_drafts,
    greedy_draft,
    never,
    sampled_drafts,
    total_variation,
)

__all__ = [
    "Enumeration",
    "Interval",
    "IntervalRandomness",
    "Joint",
    "Key",
    "NeedsOutcomesError",
    "Outcomes",
    "Path",
    "Proposals",
    "Stop",
    "TableModel",
    "UnsoundError",
    "Verify",
    "bias",
    "chain",
    "continued",
    "emitted_tokens",
    "enumerate_step",
    "expected_accepted",
    "fixed_drafts",
    "greedy_draft",
    "interval_joint",
    "never",
    "sampled_drafts",
    "select_rows",
    "step_joint",
    "total_variation",
]


def expected_accepted(verify: Verify, target: TableModel, proposals: Proposals) -> float:
    """Mean number of kept draft tokens of one step."""
    outcomes = enumerate_step(verify, proposals, target_pass(target, proposals))
    return float((outcomes.weights * outcomes.verdict.num_accepted).sum())
