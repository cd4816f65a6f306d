"""The fast way to verdicts that fits a target's passes."""

from __future__ import annotations

from outrider.models.graphs import GraphedPass
from outrider.models.lm import LM
from outrider.verifiers.kernels import Kernels
from outrider.verifiers.recorded import RecordedVerdicts

FastVerdicts = Kernels | RecordedVerdicts


def verdicts_of(target: LM) -> FastVerdicts | None:
    """Native kernels alongside native passes, recorded verdicts alongside recorded passes; None: the
    verifiers themselves."""
    if target.kernels is not None:
        return Kernels(target.kernels)
    return RecordedVerdicts() if isinstance(target.run, GraphedPass) else None
