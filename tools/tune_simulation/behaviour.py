"""How families behave on rehearsed machines: acceptance and costs, of which every world of
`simulate.py` is a variation.

Drafters without heads are as on the shared pair (benchmarks/results/bench-2026-11-22.json.gz: a 100M
target, a 14M draft, two cores). Heads and exits accept as in docs/results/heads.md; on the demo,
whose passes are cheaper, a step of 7 EAGLE-3 tokens takes 2.6 plain steps, one of a block head 2.5,
of four Medusa heads 1.5 (README.md), here somewhat less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.lab.tune.space import Family


@dataclass(frozen=True)
class Behaviour:
    """How a family behaves: P(i-th node kept | those before it kept), and costs in plain steps."""

    acceptance: tuple[float, ...]  # the last one goes on
    step: float  # of drafting at all
    node: float  # of each node
    offers: float = 1.0  # share of the steps in which there is a draft


CHAINS = {
    "draft-model": Behaviour((0.70, 0.75, 0.80), 0.02, 0.075),
    "composite": Behaviour((0.72, 0.76, 0.80, 0.65, 0.5, 0.4, 0.3), 0.10, 0.085),
    "ngram": Behaviour((0.6, 0.75, 0.8), 0.01, 0.012, 0.4),
    "suffix": Behaviour((0.6, 0.78, 0.84), 0.01, 0.012, 0.5),
    "ngram-cache": Behaviour((0.5, 0.45, 0.4), 0.05, 0.03, 0.8),
    "recycling": Behaviour((0.55, 0.5, 0.4), 0.05, 0.03),
    "lookahead": Behaviour((0.4, 0.4, 0.4), 0.10, 0.06),
    "eagle": Behaviour((0.60, 0.58, 0.55), 0.06, 0.06),
    "eagle3": Behaviour((0.66, 0.68, 0.70), 0.06, 0.06),
    "medusa": Behaviour((0.60, 0.47, 0.40, 0.35), 0.08, 0.02),
    "block": Behaviour((0.66, 0.68, 0.68), 0.30, 0.02),
    "early-exit": Behaviour((0.5, 0.55, 0.6), 0.05, 0.0),  # costs: see `behaviour_of`
    "quantised": Behaviour((0.95, 0.97, 0.97), 0.05, 0.3),
}
TREES = {
    "draft-model": Behaviour((0.80, 0.76, 0.72, 0.5, 0.4, 0.3, 0.2), 0.15, 0.12),
    "eagle": Behaviour((0.70, 0.62, 0.55, 0.4, 0.3, 0.2), 0.15, 0.10),
    "eagle3": Behaviour((0.76, 0.72, 0.66, 0.5, 0.4, 0.3, 0.2), 0.15, 0.10),
    "medusa": Behaviour((0.68, 0.55, 0.45, 0.3), 0.12, 0.03),
    "block": Behaviour((0.75, 0.70, 0.66, 0.5, 0.4, 0.3, 0.2), 0.36, 0.05),
}
STOPPED = {
    "draft-model": Behaviour((0.74, 0.8, 0.84), 0.08, 0.09, 0.9),
    "block": Behaviour((0.72, 0.74, 0.76), 0.36, 0.03, 0.9),
}
NUM_LAYERS = 8  # of the rehearsed target
# how much likelier a token is kept for each further share of the layers that drafts it
EXIT_GAIN = 0.55


def behaviour_of(family: Family) -> Behaviour:
    """The behaviour of a family of the default space."""
    drafter = family.configuration.drafter
    options = family.configuration.drafter_options
    if "tree" in options:
        return TREES[drafter]
    if "stop" in options:
        return STOPPED[drafter]
    if "exit_layer" in options:
        share = options["exit_layer"] / NUM_LAYERS
        kept = tuple(one + EXIT_GAIN * (share - 0.5) for one in CHAINS[drafter].acceptance)
        return replace(CHAINS[drafter], acceptance=kept, node=share)
    return CHAINS[drafter]
