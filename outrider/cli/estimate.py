"""`outrider estimate`: what speculation would bring, from acceptance and costs, sizes or bandwidth, without running anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from outrider.cli import typed
from outrider.cli.lab import OutputOptions, command_line, deliver
from outrider.cli.options import RemoteOptions
from outrider.cli.verbs import option, refuse_unused, with_groups, written
from outrider.demo import demo_paths
from outrider.errors import ConfigError
from outrider.extras import check_lab

if TYPE_CHECKING:
    from outrider.lab.estimate.estimate_result import EstimateInput
    from outrider.lab.estimate.measured import Known
    from outrider.lab.estimate.roofline import DtypeName, Machine, ModelSize

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
class EstimateOptions:
    """How far drafts survive; what drafting costs, from times, a result or sizes; which draft lengths."""

    alpha: float | None = option(None, ACCEPTANCE, "Accepted / tested draft tokens, the same everywhere: 0.8.")
    acceptance: str | None = option(
        None, ACCEPTANCE,
        "By position, each if the one before was kept: 0.9,0.85,0.8. The last one goes on.",
        metavar="P,P,...",
    )  # fmt: skip
    c: float | None = option(None, TIMES, "Seconds of a draft token / seconds of a target pass.")
    draft_ms: float | None = option(None, TIMES, "Milliseconds of one draft token.")
    target_ms: float | None = option(None, TIMES, "Milliseconds of one target pass.")
    costs: Path | None = option(
        None, TIMES,
        "Times by query tokens, drafting and overhead, as JSON (docs/algorithms/estimate.md).",
        metavar="FILE",
    )  # fmt: skip
    result: Path | None = option(
        None, RESULT, "A result of bench or tune: costs and, where not given otherwise, acceptance.", metavar="FILE"
    )
    configuration: str | None = option(
        None, RESULT, "Which of its configurations.", metavar="LABEL", show_default="the fastest chain"
    )
    cell: str | None = option(None, RESULT, "Which of its cells or tasks.", metavar="LABEL", show_default="the first")
    target: str | None = option(None, SIZES, "Folder with config.json, a .gguf file, or demo: its size.", metavar="FOLDER")
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
    num_draft_tokens: int | None = option(None, LENGTHS, "The draft length to judge.", show_default="the best")
    max_draft_tokens: int | None = option(None, LENGTHS, "The longest one to try.", show_default="12")

    def known(self) -> Known | None:
        """What a stored result tells; None where no result is given. Raises ConfigError for what the file does not have."""
        from outrider.lab.estimate.measured import read_known

        if self.result is None:
            unused = [written(name) for name in ("configuration", "cell") if getattr(self, name) is not None]
            refuse_unused(unused, "without --result FILE")
            return None
        return read_known(self.result, self.configuration, self.cell)

    def model(self, who: str, dtype: DtypeName) -> ModelSize | None:
        """The size of "target" or "draft"; None where no option names it. Raises ConfigError, CheckpointError,
        CapabilityError.
        """
        from outrider.lab.estimate.roofline import size_of

        folder, count = getattr(self, who), getattr(self, f"{who}_params")
        if folder is not None and count is not None:
            raise ConfigError(f"--{who} and --{who}-params both say how large the {who} is; give one of them")
        if count is not None:
            return size_of(count, typed.parameters(f"--{who}-params", count), dtype)
        return None if folder is None else _folder_size(who, folder, dtype)

    def machine(self) -> Machine | None:
        """None without --bandwidth. Raises ConfigError."""
        from outrider.lab.estimate.roofline import Machine

        if self.bandwidth is None:
            if self.flops is not None:
                raise ConfigError(
                    "--set flops needs --bandwidth beside it: a pass takes the longer of reading and arithmetic"
                )
            return None
        rate = None if self.flops is None else typed.flops("--set flops", self.flops)
        return Machine(bandwidth=typed.bandwidth("--bandwidth", self.bandwidth), flops=rate)

    @property
    def has_acceptance(self) -> bool:
        """Whether the user says how far drafts survive."""
        return self.alpha is not None or self.acceptance is not None

    def question(self, known: Known | None, remote: RemoteOptions) -> EstimateInput:
        """The estimate's input. Raises ConfigError for what cannot be read or changes nothing."""
        from outrider.lab.estimate.curves import read_costs
        from outrider.lab.estimate.estimate_result import EstimateInput

        dtype = self.dtype or DEFAULT_DTYPE
        target, draft = self.model("target", dtype), self.model("draft", self.draft_dtype or dtype)
        if self.dtype is not None and target is None and draft is None:
            raise ConfigError(
                "--dtype changes nothing without the size of a model: add --target-params or --target FOLDER, or leave it out"
            )
        if self.draft_dtype is not None and draft is None:
            raise ConfigError(
                "--set draft_dtype changes nothing without the draft's size: add --draft-params or --draft FOLDER, or leave it "
                "out"
            )
        if known is not None and self.costs is not None:
            raise ConfigError("--costs and --result both say what steps cost; give one of them")
        survived = None if known is None or self.has_acceptance else known.acceptance
        return EstimateInput(
            alpha=self.alpha,
            acceptance=survived if self.acceptance is None else typed.probabilities("--acceptance", self.acceptance),
            c=self.c,
            target_pass_s=_seconds(self.target_ms),
            draft_token_s=_seconds(self.draft_ms),
            target=target,
            draft=draft,
            hardware=self.machine(),
            costs=known.costs if known is not None else None if self.costs is None else read_costs(self.costs),
            num_draft_tokens=self.num_draft_tokens,
            max_draft_tokens=self.max_draft_tokens,
            num_rows=self.batch_size,
            context=self.context,
            remote_rtt_s=_seconds(remote.remote_rtt_ms),
        )


@with_groups
def estimate(options: EstimateOptions, remote: RemoteOptions, output: OutputOptions) -> int:
    """Predict the speedup from acceptance and costs, without running anything."""
    check_lab("estimate")
    from outrider.lab.estimate.estimate import estimate as answer

    output.check()
    known = options.known()
    result = answer(options.question(known, remote))
    if known is not None:
        both = "costs" if options.has_acceptance else "costs and acceptance"
        result.notes.append(f"{both} from {options.result} ({known.source})")
    result.command = command_line()
    deliver(result, output)
    return 0


def _folder_size(who: str, folder: str, dtype: DtypeName) -> ModelSize:
    from outrider.lab.estimate.sizes import size_of_folder

    if folder == DEMO:
        return size_of_folder(getattr(demo_paths(), who), dtype, f"demo {who}")
    return size_of_folder(Path(folder).expanduser(), dtype)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
