"""`outrider estimate`: what speculation would bring, from acceptance and costs, without running
anything."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli import typed
from outrider.cli.lab import OutputOptions, answer
from outrider.cli.verbs import option, refuse_unused, with_groups
from outrider.errors import ConfigError
from outrider.extras import check_lab

if TYPE_CHECKING:
    from outrider.lab.estimate.estimate_result import Mixture, ModelSize
    from outrider.lab.predict import StepCosts

NUMBERS = "Acceptance and costs"
MEMORY = "Memory"
ENOUGH = "enough is --alpha 0.8 --c 0.1, or --result FILE of 'outrider bench'"


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """How often drafts are accepted, what they cost, and which models take memory."""

    alpha: str | None = option(
        None,
        NUMBERS,
        "Accepted / tested draft tokens: 0.8, or by position 0.9,0.85,0.8; the last one holds for "
        "all after it.",
        metavar="P,...",
        common=True,
    )
    c: float | None = option(
        None, NUMBERS, "Time of a draft token / of a target pass; 0 for look-ups.", common=True
    )
    pass_cost: str | None = option(
        None,
        NUMBERS,
        "Time of a pass over N tokens / over one: 5:1.05,9:1.4.",
        metavar="N:COST,...",
        show_default="all cost the same; with --target, those of a mixture by their experts",
        common=True,
    )
    result: Path | None = option(
        None,
        NUMBERS,
        "A result of bench: its costs and, without --alpha, its acceptance.",
        metavar="FILE",
        common=True,
    )
    target: str | None = option(
        None,
        MEMORY,
        "The target: a folder, a .gguf file, a hub id, or demo; of a mixture its experts count, too.",
        metavar="MODEL",
        common=True,
    )
    draft: str | None = option(None, MEMORY, "The draft model.", metavar="MODEL", common=True)

    def premises(self) -> tuple[list[float], StepCosts, str]:
        """Acceptance, costs, and where the costs come from. Raises ConfigError for what is missing
        or given twice."""
        from outrider.lab.estimate.estimate import costs_of, read_bench

        acceptance = None if self.alpha is None else typed.probabilities("--alpha", self.alpha)
        if self.result is not None:
            numbers = {"--c": self.c, "--pass-cost": self.pass_cost}
            refuse_unused(
                [name for name, given in numbers.items() if given is not None],
                "with --result, which has the costs",
            )
            chain = read_bench(self.result)
            return acceptance or chain.acceptance, chain.costs, f"{self.result} ({chain.source})"
        if acceptance is None or self.c is None:
            missing = (
                "how often draft tokens are accepted"
                if acceptance is None
                else "what a draft token costs"
            )
            raise ConfigError(f"nothing says {missing}: {ENOUGH}")
        passes = typed.by_count("--pass-cost", self.pass_cost) if self.pass_cost else {}
        mixture = self.mixture
        if passes:
            widths = f"passes {self.pass_cost}"
        elif mixture is not None:
            widths = (
                f"passes that cost the bytes of their experts ({mixture.experts}, {mixture.active} a "
                f"token; {mixture.plain_share:.0%} of a plain pass), named by chance: tokens of one "
                "text share more"
            )
        else:
            widths = "passes that cost the same however many tokens they check"
        return acceptance, costs_of(self.c, passes, mixture), f"c {self.c:g} and {widths}"

    @cached_property
    def mixture(self) -> Mixture | None:
        """The experts of the target, where one is named and is a mixture. Raises CheckpointError,
        CapabilityError."""
        from outrider.lab.estimate.experts import mixture_of

        return None if self.target is None else mixture_of(self.target)

    def memory(self) -> list[ModelSize]:
        """The memory of the models named. Raises CheckpointError, CapabilityError."""
        from outrider.lab.estimate.estimate import model_size

        if self.draft == "auto":
            raise ConfigError(
                "--draft auto looks for what runs here, and estimate runs nothing: name a draft "
                "model ('outrider ls drafters-for MODEL' lists them)"
            )
        sizes = [] if self.target is None else [model_size("target", self.target)]
        return sizes if self.draft is None else [*sizes, model_size("draft", self.draft)]


@with_groups
def estimate(options: EstimateOptions, output: OutputOptions) -> int:
    """Predict the speedup from acceptance and costs, without running anything."""
    check_lab("estimate")
    from outrider.lab.estimate.estimate import estimate as predicted

    output.check()
    premises = options.premises()
    return answer(output, lambda _: predicted(*premises, options.memory(), options.mixture))
