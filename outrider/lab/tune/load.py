"""How many tokens to draft when the machine is busier: acceptance does not depend on the load, costs do.

At each batch size plain decoding and the favourite families run a short sweep; what their steps cost there, together with the
acceptance that is known already, gives the best size for that load, none included. Between the batch sizes that were measured
the smaller one's choice holds: a schedule like vLLM's `num_speculative_tokens_per_batch_size`.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.lab.result import Record
from outrider.lab.tune.forecast import Forecast, forecast, overall, plain_tokens_per_s, step_costs
from outrider.lab.tune.probe import Probe
from outrider.lab.tune.space import Family

WORTH = 1.02  # forecast speedup below which drafting is not worth the trouble


class LoadStep(Record):
    """From `batch_size` rows on."""

    batch_size: int
    configuration: str  # its label; "none": do not speculate
    size: int  # nodes; 0: none
    tokens_per_s: float  # forecast, all rows together
    plain_tokens_per_s: float
    speedup: float


def best_at(
    batch_size: int, families: Sequence[tuple[Family, Probe, Probe]], plain: Probe, shares: dict[str, float]
) -> LoadStep:
    """`families`: each with the probe that knows its acceptance and the one that was timed at this batch size. Where answers are
    so short that no plain step could be timed, nothing is known to pay."""
    base = plain_tokens_per_s(plain, batch_size)
    found: list[Forecast] = []
    for family, acceptance, timed in families if base else ():
        if (costs := step_costs(timed, batch_size)) is not None:
            found += forecast(family, acceptance, costs, base)
    speedups = overall(found, shares, dict.fromkeys(shares, base)) if base else {}
    best = max(speedups, key=lambda label: speedups[label], default=None)
    if best is None or speedups[best] < WORTH:
        return LoadStep(
            batch_size=batch_size, configuration="none", size=0, tokens_per_s=base, plain_tokens_per_s=base, speedup=1.0
        )
    size = next(one.size for one in found if one.configuration == best)
    return LoadStep(
        batch_size=batch_size, configuration=best, size=size, tokens_per_s=base * speedups[best], plain_tokens_per_s=base,
        speedup=speedups[best],
    )  # fmt: skip
