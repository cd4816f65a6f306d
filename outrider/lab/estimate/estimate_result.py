"""What an estimate is asked, and what it answers. Names of fields are the command line's, times in seconds."""

from __future__ import annotations

from typing import Literal

from outrider.lab.estimate.curves import SpeedPrediction, StepCosts
from outrider.lab.estimate.roofline import Machine, ModelSize
from outrider.lab.result import Record, Result

ModelName = Literal["leviathan", "envelope", "curve"]
CostSource = Literal["measured", "roofline", "flat"]


class EstimateInput(Record):
    """Everything optional; `estimate` says what is missing. Acceptance: one of `alpha`, `acceptance`. Costs: `costs` alone, or
    a draft token's (`c`, `draft_token_s`, or from sizes) and where known a target pass's (`target_pass_s`, or `target` on
    `hardware`).
    """

    alpha: float | None = None  # accepted / tested, the same at all positions
    acceptance: list[float] | None = (
        None  # P(token i kept | the ones before it kept), i = 1, 2, ...; the last one goes on
    )
    c: float | None = None  # draft token / target pass
    target_pass_s: float | None = None
    draft_token_s: float | None = None
    target: ModelSize | None = None
    draft: ModelSize | None = None
    hardware: Machine | None = None
    costs: StepCosts | None = None
    num_draft_tokens: int | None = None  # None: the best
    max_draft_tokens: int | None = None  # longest length tried; None: 12, or num_draft_tokens where that is more
    num_rows: int | None = None  # None: 1, or that of `costs`
    context: int | None = None  # cached tokens per row; None: 4096
    remote_rtt_s: float | None = None  # round trip to a draft service; None: drafting happens in the target's process


class LengthEstimate(Record):
    """All models at one draft length."""

    num_draft_tokens: int
    leviathan_tau: float  # (1 - alpha^(gamma+1)) / (1 - alpha)
    leviathan_speedup: float  # that / (gamma c + 1)
    effective_gamma: float  # kept draft tokens per step, tau - 1 = S(1) + ... + S(gamma)
    envelope_speedup: float  # effective_gamma T / (gamma t + T); 1 at gamma = 0
    curve: SpeedPrediction  # its step_s and tokens_per_s mean something only where `EstimateResult.is_timed`


class ModelEstimate(Record):
    """One model's opinion."""

    name: ModelName
    best_num_draft_tokens: int  # 0: do not speculate
    best_speedup: float
    speedup: float  # at EstimateResult.num_draft_tokens
    break_even_alpha: float | None  # there; None: no alpha pays
    lowest_break_even_alpha: float | None  # over all lengths tried
    lowest_break_even_length: int | None


class Sensitivity(Record):
    """Speedups at EstimateResult.num_draft_tokens if all positions accepted with `alpha`."""

    alpha: float
    leviathan: float
    envelope: float
    curve: float


class Roof(Record):
    """What sizes and bandwidth say (outrider/lab/estimate/roofline.py)."""

    target_pass_s: float  # over one token per row
    draft_pass_s: float | None  # None: the draft's size was not given
    free_tokens: (
        float | None
    )  # query tokens per row that a target pass takes at the price of one; None: FLOPS not given
    free_rows: float | None  # rows up to which a pass of this length waits for memory; None: always, or FLOPS not given


class MemoryOverhead(Record):
    """What the draft model takes. Keys and values: rows x context x bytes per token."""

    draft_weights_bytes: int
    draft_kv_bytes: int | None  # None: not known from a number of parameters
    target_weights_bytes: int | None
    target_kv_bytes: int | None
    share: float | None  # (draft weights + KV) / (target weights + KV), unknown KV left out on both sides


class RemoteLength(Record):
    """Drafts from a service, at one draft length."""

    num_draft_tokens: int
    tau: float
    target_s: float  # a step without drafting
    reply_s: float  # round trip and drafting
    speedup: float  # every step waits for its draft
    co_located_speedup: float  # with the draft in the target's process


class RemoteEstimate(Record):
    """What a draft service would bring (outrider/lab/estimate/remote.py)."""

    rtt_s: float
    lengths: list[RemoteLength]  # gamma = 1, 2, ...
    best_num_draft_tokens: int
    speedup: float  # there
    pays: bool
    in_time: bool  # a reply takes no longer than a plain step: the drafter waits for it
    co_located_speedup: float  # at its own best length


class EstimateResult(Result):
    """What `estimate` predicts from acceptance and costs."""

    kind: Literal["estimate"] = "estimate"
    input: EstimateInput
    num_rows: int
    context: int | None  # None: nothing depends on it
    alpha: float  # accepted / tested over the positions given: what Leviathan's formula is fed with
    survival: list[float]  # S(1) .. S(longest length)
    c: float  # draft token / plain target pass
    cost_source: CostSource  # of the curve
    costs: StepCosts  # what the curve model used; in target passes instead of seconds unless `is_timed`
    is_timed: bool
    num_draft_tokens: int  # the length looked at, at least 1: as asked, or the curve's best
    equivalent_alpha: float  # the alpha that, equal at all positions, gives the same tau at that length
    pays: bool  # whether the curve's speedup there is above 1
    lengths: list[LengthEstimate]  # gamma = 0, 1, ...
    models: list[ModelEstimate]
    sensitivity: list[Sensitivity]
    roof: Roof | None
    memory: MemoryOverhead | None
    remote: RemoteEstimate | None = None  # None: no draft service was asked about
