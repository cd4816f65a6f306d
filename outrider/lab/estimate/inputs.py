"""From what a person knows to what the formulas need: a survival curve, and the costs of a step. What is missing, given twice or
without effect is refused, with what would be enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.lab.estimate.curves import CostPoints, StepCosts
from outrider.lab.estimate.estimate_result import CostSource, EstimateInput
from outrider.lab.estimate.roofline import DecodeLoad, Machine, memory_seconds, pass_curve, pass_seconds
from outrider.sampling.theory import alpha_of, survival_of

MAX_DRAFT_TOKENS = 12
CONTEXT = 4096
ENOUGH_ACCEPTANCE = (
    "enough is --alpha 0.8 (accepted / tested; 'outrider generate' prints it), or --acceptance 0.9,0.85,0.8 (by position, "
    "the last one goes on)"
)
ENOUGH_COSTS = (
    "enough is one of: --c 0.1; --draft-ms 2 --target-ms 20; --draft-params 1B --target-params 8B, or --draft FOLDER "
    "--target FOLDER (with --bandwidth 900GB/s also tokens/s); --costs FILE. A drafter without a model: --c 0"
)


@dataclass(frozen=True)
class AssumedAcceptance:
    """How far drafts survive."""

    survival: list[float]
    alpha: float


@dataclass(frozen=True)
class Costs:
    """What a step costs; in units of a target pass unless `is_timed`."""

    steps: StepCosts
    c: float
    source: CostSource
    is_timed: bool


def longest(asked: EstimateInput) -> int:
    """The longest draft length to try."""
    wanted, max_drafted = asked.num_draft_tokens, asked.max_draft_tokens
    if wanted is not None and wanted < 1:
        raise ConfigError(f"--num-draft-tokens must be at least 1, got {wanted}; plain decoding is in every estimate")
    if max_drafted is not None and max_drafted < max(1, wanted or 1):
        raise ConfigError(f"--max-draft-tokens must be at least {max(1, wanted or 1)}, got {max_drafted}")
    return max_drafted or max(MAX_DRAFT_TOKENS, wanted or 0)


def acceptance_of(asked: EstimateInput, length: int) -> AssumedAcceptance:
    """How far drafts survive, from whichever way it was given.

    Raises ConfigError where there is none, two, or a value outside 0..1.
    """
    if asked.alpha is not None and asked.acceptance is not None:
        raise ConfigError("--alpha and --acceptance both say how often draft tokens are accepted; give one of them")
    if asked.acceptance is not None:
        given = asked.acceptance
    elif asked.alpha is not None:
        given = [asked.alpha]
    else:
        raise ConfigError(f"nothing says how often draft tokens are accepted: {ENOUGH_ACCEPTANCE}")
    return AssumedAcceptance(survival_of(given, length), alpha_of(survival_of(given, len(given))))


def load_of(asked: EstimateInput) -> DecodeLoad:
    """Rows and context. Raises ConfigError where they contradict the costs or change nothing."""
    measured = asked.costs.num_rows if asked.costs else None
    if measured and asked.num_rows not in (None, measured):
        raise ConfigError(
            f"--batch-size {asked.num_rows}, but the costs are of {measured} row(s): leave --batch-size out, or measure "
            f"costs with {asked.num_rows}"
        )
    for option, value, minimum in (("--batch-size", asked.num_rows, 1), ("--set context", asked.context, 0)):
        if value is not None and value < minimum:
            raise ConfigError(f"{option} must be at least {minimum}, got {value}")
    if asked.context is not None and not knows_kv(asked):
        raise ConfigError(
            "--set context changes nothing without the size of keys and values: add --target FOLDER and --draft FOLDER"
        )
    timed = asked.target_pass_s is not None or asked.hardware is not None or asked.costs is not None
    if asked.num_rows is not None and not timed and not knows_kv(asked):
        raise ConfigError(
            "--batch-size changes nothing without times or the size of keys and values: add --target-ms, --bandwidth or folders"
        )
    return DecodeLoad(num_rows=asked.num_rows or measured or 1, context=CONTEXT if asked.context is None else asked.context)


def knows_kv(asked: EstimateInput) -> bool:
    """Whether rows and context matter for memory."""
    return any(model.kv_bytes_per_token is not None for model in (asked.target, asked.draft) if model is not None)


def costs_of(asked: EstimateInput, length: int, load: DecodeLoad) -> Costs:
    """What steps cost, from whichever way it was given. Raises ConfigError where costs are missing, contradictory or unused."""
    if asked.target is not None and asked.target.params_per_pass == 0:
        raise ConfigError("--target-params must be above 0")
    if asked.costs is not None:
        return _measured(asked, asked.costs)
    _check_sources(asked)
    _check_sizes(asked)
    curve, is_timed = _target_curve(asked, length, load)
    plain_s = curve.seconds(1)[0]
    c = _c(asked, plain_s, load)
    steps = StepCosts(target=curve, draft_s_per_token=c * plain_s, num_rows=load.num_rows)
    return Costs(steps, c, "roofline" if asked.hardware else "flat", is_timed)


def _measured(asked: EstimateInput, costs: StepCosts) -> Costs:
    others = {
        "--c": asked.c,
        "--draft-ms": asked.draft_token_s,
        "--target-ms": asked.target_pass_s,
        "--bandwidth": asked.hardware,
    }
    if twice := [option for option, value in others.items() if value is not None]:
        raise ConfigError(f"--costs says what steps cost already; leave out {', '.join(twice)}")
    if asked.target is not None and asked.draft is None:
        raise ConfigError(
            "the target's size changes nothing beside --costs without the draft's: add --draft or --draft-params"
        )
    return Costs(costs, _measured_c(costs), "measured", is_timed=True)


def _measured_c(costs: StepCosts) -> float:
    """Draft token / plain target pass. Of whole steps: what a step grows by per draft token, in plain steps."""
    if not costs.whole_steps:
        return costs.draft_s_per_token / costs.target.seconds(1)[0]
    max_drafted = costs.target.points[-1].num_tokens - 1
    return (costs.relative(max_drafted) - 1) / max_drafted if max_drafted else 0.0


def _check_sources(asked: EstimateInput) -> None:
    for option, value in (("--draft-ms", asked.draft_token_s), ("--c", asked.c)):
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{option} must be at least 0, got {value}")
    if asked.target_pass_s is not None and not 0 < asked.target_pass_s < float("inf"):
        raise ConfigError("--target-ms must be above 0")
    if asked.c is not None and asked.draft_token_s is not None:
        raise ConfigError("--c and --draft-ms both say what a draft token costs; give one of them")
    if asked.target_pass_s is not None and asked.hardware is not None:
        raise ConfigError("--target-ms and --bandwidth both say how long a target pass takes; give one of them")
    if asked.c is None and asked.draft_token_s is None and asked.draft is None:
        raise ConfigError(f"nothing says what a draft token costs: {ENOUGH_COSTS}")
    if asked.draft_token_s is not None and asked.target_pass_s is None and asked.hardware is None:
        raise ConfigError(f"--draft-ms alone is half of it: add --target-ms. In general {ENOUGH_COSTS}")


def _check_sizes(asked: EstimateInput) -> None:
    if asked.hardware is not None and asked.target is None:
        raise ConfigError("--bandwidth needs to know what is read: add --target-params 8B or --target FOLDER")
    if asked.target is not None and asked.draft is None and asked.hardware is None:
        raise ConfigError(
            "the target's size changes nothing without --bandwidth or the draft's size: add one, or leave it out"
        )


def _target_curve(asked: EstimateInput, length: int, load: DecodeLoad) -> tuple[CostPoints, bool]:
    """Target passes, and whether in seconds: by the roof, flat, or flat in units of themselves."""
    if asked.hardware is not None and asked.target is not None:
        return pass_curve(asked.target, length + 1, asked.hardware, load), True
    seconds = asked.target_pass_s or 1.0
    return CostPoints.of({1: seconds, length + 1: seconds}), asked.target_pass_s is not None


def _c(asked: EstimateInput, plain_s: float, load: DecodeLoad) -> float:
    if asked.c is not None:
        return asked.c
    if asked.draft_token_s is not None:
        return asked.draft_token_s / plain_s
    assert asked.draft is not None  # _check_sources
    if asked.hardware is not None:
        return pass_seconds(asked.draft, 1, asked.hardware, load) / plain_s
    if asked.target is None:
        raise ConfigError(
            f"the draft's size tells costs only beside the target's: add --target-params or --target. In general {ENOUGH_COSTS}"
        )
    anything = Machine(bandwidth=1.0)  # it cancels
    return memory_seconds(asked.draft, anything, load) / memory_seconds(asked.target, anything, load)
