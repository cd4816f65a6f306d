"""`outrider estimate`: what speculation would bring, from acceptance and costs, sizes or bandwidth, without running anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.cli import typed
from outrider.cli.lab import OutputOptions, command_line, deliver
from outrider.cli.options import RemoteOptions
from outrider.cli.verbs import option, with_groups
from outrider.demo import demo_paths
from outrider.errors import ConfigError
from outrider.lazy import deferred

with deferred():
    from outrider.lab.estimate.curves import read_costs
    from outrider.lab.estimate.estimate import estimate as answer
    from outrider.lab.estimate.estimate_result import EstimateInput
    from outrider.lab.estimate.measured import Known, read_known
    from outrider.lab.estimate.roofline import DtypeName, Machine, ModelSize, size_of
    from outrider.lab.estimate.sizes import size_of_folder

ACCEPTANCE = "How often draft tokens are kept (one of these)"
TIMES = "What drafting costs: as times"
SIZES = "What drafting costs: from sizes (also: memory)"
RESULT = "Or: what was measured"
LENGTHS = "What to look at"
Dtype = Literal[
    "float32", "bfloat16", "float16", "float8", "int8", "int4"
]  # outrider.lab.estimate.roofline.DTYPE_BYTES
DEFAULT_DTYPE: Dtype = "bfloat16"
DEMO = "demo"


@dataclass(frozen=True, kw_only=True)
class AcceptanceOptions:
    """How far drafts survive."""

    alpha: float | None = option(None, ACCEPTANCE, "Accepted / tested draft tokens, the same everywhere: 0.8.")
    acceptance: str | None = option(
        None, ACCEPTANCE,
        "By position, each if the one before was kept: 0.9,0.85,0.8. The last one goes on.",
        metavar="P,P,...",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TimeOptions:
    """Costs as they were measured, or their ratio."""

    c: float | None = option(None, TIMES, "Seconds of a draft token / seconds of a target pass.")
    draft_ms: float | None = option(None, TIMES, "Milliseconds of one draft token.")
    target_ms: float | None = option(None, TIMES, "Milliseconds of one target pass.")
    costs: Path | None = option(
        None, TIMES,
        "Times by query tokens, drafting and overhead, as JSON (docs/algorithms/estimate.md).",
        metavar="FILE",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Both from a run that was measured."""

    result: Path | None = option(
        None, RESULT, "A result of bench or tune: costs and, where not given otherwise, acceptance.", metavar="FILE"
    )
    configuration: str | None = option(
        None, RESULT, "Which of its configurations.", metavar="LABEL", show_default="the fastest chain"
    )
    cell: str | None = option(None, RESULT, "Which of its cells or tasks.", metavar="LABEL", show_default="the first")

    def known(self) -> Known | None:
        """Raises ConfigError for what the file does not have."""
        if self.result is None:
            for name, value in (("configuration", self.configuration), ("cell", self.cell)):
                if value is not None:
                    raise ConfigError(f"--set {name} means nothing without --result FILE")
            return None
        return read_known(self.result, self.configuration, self.cell)


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Sizes of the models, speed of the machine."""

    target: str | None = option(None, SIZES, "Folder with config.json, or demo: its size.", metavar="FOLDER")
    draft: str | None = option(None, SIZES, "The same for the draft.", metavar="FOLDER")
    target_params: str | None = option(None, SIZES, "Parameters of the target instead: 8B.")
    draft_params: str | None = option(None, SIZES, "Of the draft: 1B, 0 without a draft model.")
    dtype: Dtype | None = option(None, SIZES, "Of the weights.", show_default=DEFAULT_DTYPE)
    draft_dtype: Dtype | None = option(None, SIZES, "Of the draft's weights.", show_default="the target's")
    bandwidth: str | None = option(None, SIZES, "Of the memory with the weights: 900GB/s.")
    flops: str | None = option(
        None, SIZES, "Arithmetic at best: 300TFLOPS. Shows when long drafts cost.", show_default="no limit"
    )
    batch_size: int | None = option(None, SIZES, "Rows decoded together.", show_default="1")
    context: int | None = option(None, SIZES, "Tokens per row in the KV cache.", show_default="4096")

    def model(self, who: str, dtype: DtypeName) -> ModelSize | None:
        """The size of "target" or "draft"; None where no option names it. Raises ConfigError, CheckpointError,
        CapabilityError.
        """
        folder, count = getattr(self, who), getattr(self, f"{who}_params")
        if folder is not None and count is not None:
            raise ConfigError(f"--{who} and --{who}-params both say how large the {who} is; give one of them")
        if count is not None:
            return size_of(count, typed.parameters(f"--{who}-params", count), dtype)
        return None if folder is None else _folder_size(who, folder, dtype)

    def machine(self) -> Machine | None:
        """None without --bandwidth. Raises ConfigError."""
        if self.bandwidth is None:
            if self.flops is not None:
                raise ConfigError(
                    "--set flops needs --bandwidth beside it: a pass takes the longer of reading and arithmetic"
                )
            return None
        rate = None if self.flops is None else typed.flops("--set flops", self.flops)
        return Machine(bandwidth=typed.bandwidth("--bandwidth", self.bandwidth), flops=rate)


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Draft lengths."""

    num_draft_tokens: int | None = option(None, LENGTHS, "The draft length to judge.", show_default="the best")
    max_draft_tokens: int | None = option(None, LENGTHS, "The longest one to try.", show_default="12")


@with_groups
def estimate(
    acceptance: AcceptanceOptions, times: TimeOptions, measured: ResultOptions, sizes: SizeOptions, remote: RemoteOptions,
    lengths: LengthOptions, output: OutputOptions,
) -> int:  # fmt: skip
    """Predict the speedup from acceptance and costs, without running anything."""
    output.check()
    known = measured.known()
    result = answer(asked(acceptance, times, sizes, lengths, known, remote))
    if known is not None:
        result.notes.append(f"costs{'' if _names(acceptance) else ' and acceptance'} from {measured.result} ({known.source})")
    result.command = command_line()
    deliver(result, output)
    return 0


def asked(
    acceptance: AcceptanceOptions, times: TimeOptions, sizes: SizeOptions, lengths: LengthOptions, known: Known | None,
    remote: RemoteOptions,
) -> EstimateInput:  # fmt: skip
    """The options as the library's question. Raises ConfigError for what cannot be read or changes nothing."""
    dtype = sizes.dtype or DEFAULT_DTYPE
    target, draft = sizes.model("target", dtype), sizes.model("draft", sizes.draft_dtype or dtype)
    if sizes.dtype is not None and target is None and draft is None:
        raise ConfigError(
            "--dtype changes nothing without the size of a model: add --target-params or --target FOLDER, or leave it out"
        )
    if sizes.draft_dtype is not None and draft is None:
        raise ConfigError(
            "--set draft_dtype changes nothing without the draft's size: add --draft-params or --draft FOLDER, or leave it out"
        )
    if known is not None and times.costs is not None:
        raise ConfigError("--costs and --result both say what steps cost; give one of them")
    by_position = acceptance.acceptance
    survived = None if known is None or _names(acceptance) else known.acceptance
    return EstimateInput(
        alpha=acceptance.alpha,
        acceptance=survived if by_position is None else typed.probabilities("--acceptance", by_position),
        c=times.c,
        target_pass_s=_seconds(times.target_ms),
        draft_token_s=_seconds(times.draft_ms),
        target=target,
        draft=draft,
        hardware=sizes.machine(),
        costs=known.costs if known is not None else None if times.costs is None else read_costs(times.costs),
        num_draft_tokens=lengths.num_draft_tokens,
        max_draft_tokens=lengths.max_draft_tokens,
        num_rows=sizes.batch_size,
        context=sizes.context,
        remote_rtt_s=_seconds(remote.remote_rtt_ms),
        hit_rate=remote.hit_rate,
    )


def _names(acceptance: AcceptanceOptions) -> bool:
    """Whether the user says how far drafts survive."""
    return acceptance.alpha is not None or acceptance.acceptance is not None


def _folder_size(who: str, folder: str, dtype: DtypeName) -> ModelSize:
    if folder == DEMO:
        return size_of_folder(getattr(demo_paths(), who), dtype, f"demo {who}")
    return size_of_folder(Path(folder).expanduser(), dtype)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
