"""The verifier of seeded requests: with it the same seed gives the same text, with any drafter and
alongside any other rows.

Other sampled requests take it, too, where the drafter prefers it (`Drafter.prefers_shared_noise`)
and nobody named a verifier.
"""

from __future__ import annotations

from outrider.rows import RowVerifier
from outrider.sampling.params import SamplingParams
from outrider.verifiers.base import Verifier
from outrider.verifiers.coupled import CoupledVerifier

INVARIANT = CoupledVerifier()


def invariant_verifier(
    params: SamplingParams, usual: RowVerifier | type[Verifier], *, wanted: bool | None = None
) -> RowVerifier | None:
    """The verifier for a request instead of `usual`; None: no other. `wanted`: the text must not
    depend on drafts; None: where there is a seed. Greedy texts never depend on them, by any
    verifier."""
    wanted = params.seed is not None if wanted is None else wanted
    return INVARIANT if wanted and not params.is_greedy and not usual.coupled else None
