"""The options of `outrider bench`, in groups; each group knows what it means for the library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from outrider.cli.options import MIN_P, SAMPLING, TOP_K, TOP_P, MachineOptions
from outrider.cli.quantities import numbers
from outrider.cli.verbs import option
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.lab.bench.plan import Plan
    from outrider.lab.configuration import Configuration
    from outrider.lab.server.options import LoadOptions
    from outrider.lab.workload.types import Workload
    from outrider.sampling.params import SamplingParams

COMPARED, PROMPTS, ENOUGH, SERVERS = "What is compared", "Prompts", "When it is enough", "For a server's URL"


@dataclass(frozen=True, kw_only=True)
class ComparedOptions:
    """Configurations and cells."""

    drafters: list[str] | None = option(
        None, COMPARED,
        "Configurations, with commas between: 'draft-model k=5, ngram k=auto, suffix'; may be given again.",
        metavar="LIST", show_default="draft-model where there is a draft, ngram, suffix",
    )  # fmt: skip
    draft_endpoint: str | None = option(
        None, COMPARED, "Draft service of configurations with drafter 'remote'.", metavar="ADDRESS|local"
    )
    lossy: bool = option(False, COMPARED, "Allow verifiers that change the text.")
    batch_size: str = option("1", COMPARED, "Rows at once; several with commas give a curve.", metavar="N,...")
    context_lengths: str | None = option(
        None, COMPARED,
        "Fill prompts up, or cut them, to so many tokens: a curve at the first batch size.",
        metavar="N,...", show_default="prompts as they are",
    )  # fmt: skip
    grid: bool = option(False, COMPARED, "Each context length at each batch size, not at the first one only.")


def source(otherwise: str) -> Any:
    """The option `--prompts`; `otherwise`: which prompts are taken without it, where the target is not the demo's."""
    return option(
        None, PROMPTS,
        "A prompts file, a built-in name (docs/workloads.md), several with + between.",
        metavar="FILE_OR_NAME", show_default=f"demo for the demo target, else {otherwise}",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Which prompts."""

    otherwise: ClassVar[str] = "embedded:reasoning"

    prompts: str | None = source(otherwise)
    limit: int = option(16, PROMPTS, "Most prompts of each task.", min=1)
    data: Path | None = option(None, PROMPTS, "Folder with the files of named workloads.")
    on_bad: Literal["refuse", "skip"] = option("refuse", PROMPTS, "Bad lines, and prompts that do not fit.")

    def load(self, target: str, limit: int | None = None) -> Workload:
        """All of them, or at most `limit`. Raises ConfigError."""
        from outrider.lab.workload.load import load_workload

        if self.prompts is not None and self.prompts.isdigit():
            raise ConfigError(f"--prompts takes a file or a name; a number of prompts is --limit {self.prompts}")
        name = self.prompts or ("demo" if target == "demo" else self.otherwise)
        return load_workload(name, limit=limit, on_bad=self.on_bad, data=self.data)


@dataclass(frozen=True, kw_only=True)
class ConversationOptions(PromptOptions):
    """Which prompts, and how conversations are sent."""

    chat_template: bool = option(
        True, PROMPTS, "Wrap conversations in the model's chat template; false: send them as plain text."
    )


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers are sampled."""

    max_tokens: int = option(128, SAMPLING, "Max tokens of an answer.")
    temperature: str = option("0", SAMPLING, "0 is greedy; several with commas.", metavar="T,...")
    top_k: int = option(0, SAMPLING, TOP_K)
    top_p: float = option(1.0, SAMPLING, TOP_P)
    min_p: float = option(0.0, SAMPLING, MIN_P)
    ignore_eos: bool = option(False, SAMPLING, "Generate past the end of the text, so that batches stay full.")
    seed: int = option(0, SAMPLING, "Of sampled texts and of the order of batches.", min=0)

    def one_temperature(self) -> SamplingParams:
        """For servers, which are measured at one temperature at a time. Raises ConfigError for several."""
        temperatures = numbers("--temperature", self.temperature, float)
        if len(temperatures) != 1:
            raise ConfigError("a server is measured at one temperature at a time; give one --temperature")
        return self.params(temperatures[0])

    def params(self, temperature: float = 0.0) -> SamplingParams:
        """Raises ConfigError for a value out of range."""
        from outrider.sampling.params import SamplingParams

        return SamplingParams(
            temperature=temperature, max_tokens=self.max_tokens, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
            ignore_eos=self.ignore_eos,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EnoughOptions:
    """When to stop."""

    interval: float = option(0.05, ENOUGH, "Stop when each speedup's 95 % interval is as narrow, relative to it.")
    budget: float = option(20.0, ENOUGH, "Minutes of measuring, loading aside.")
    min_rounds: int = option(2, ENOUGH, "At least as many rounds over the prompts, budget permitting.")
    max_rounds: int = option(10, ENOUGH, "Maximum number of rounds.")
    max_other_cpu: float = option(0.1, ENOUGH, "Repeat a run while others used more than this share of the processors.")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """For targets that are the URL of an OpenAI-compatible server."""

    server_model: str | None = option(None, SERVERS, "Which of the server's models.", show_default="the only one")
    concurrency: str = option("1,4,16", SERVERS, "Requests in flight; several with commas.", metavar="N,...")
    api: Literal["auto", "chat", "completions"] = option("auto", SERVERS, "Which endpoint.")
    api_key_env: str | None = option(None, SERVERS, "Environment variable with the API key.", metavar="NAME")
    stall_timeout: float = option(300.0, SERVERS, "Seconds without a sign of life.")

    def load_options(self, sampling: SamplingParams) -> LoadOptions:
        """Raises ConfigError."""
        from outrider.lab.server.options import LoadOptions

        levels = tuple(numbers("--concurrency", self.concurrency, int))
        return LoadOptions(concurrency=levels, sampling=sampling, api=self.api, timeout_s=self.stall_timeout)


@dataclass(frozen=True, kw_only=True)
class BaselineOptions(ServerOptions):
    """A server, and the one to compare it with."""

    baseline_url: str | None = option(None, SERVERS, "The same model without speculation, to compare with.")
    baseline_api_key_env: str | None = option(
        None, SERVERS, "api_key_env of --baseline-url; '' sends it no key.", metavar="NAME", show_default="api_key_env"
    )


def make_plan(
    target: str, machine: MachineOptions, compared: ComparedOptions, prompts: PromptOptions, answers: AnswerOptions,
    enough: EnoughOptions,
) -> Plan:  # fmt: skip
    """Raises ConfigError."""
    from outrider.lab.bench.plan import Plan, default_configurations
    from outrider.lab.configuration import parse_configurations

    has_draft = machine.draft is not None or target == "demo"
    named = parse_configurations(compared.drafters) if compared.drafters else default_configurations(has_draft)
    if compared.draft_endpoint is not None:
        named = _with_endpoint(named, compared.draft_endpoint, is_named=bool(compared.drafters))
    return Plan(
        configurations=tuple(named),
        temperatures=tuple(numbers("--temperature", answers.temperature, float)),
        batch_sizes=tuple(numbers("--batch-size", compared.batch_size, int)),
        context_lengths=tuple(numbers("--context-lengths", compared.context_lengths or "", int)),
        grid=compared.grid,
        prompts=prompts.limit, sampling=answers.params(), seed=answers.seed, rounds=enough.min_rounds,
        max_rounds=enough.max_rounds, budget_s=60 * enough.budget, precision=enough.interval,
        max_other_cpu=enough.max_other_cpu, lossy=compared.lossy,
    )  # fmt: skip


def _with_endpoint(named: list[Configuration], endpoint: str, *, is_named: bool) -> list[Configuration]:
    """The service's address for configurations that ask one; without a list of drafters, one such in addition. Raises ConfigError
    where none of a list asks a service."""
    from dataclasses import replace

    from outrider.build import REMOTE
    from outrider.lab.configuration import Configuration

    if not is_named:
        named = [*named, Configuration(REMOTE)]
    if not any(one.drafter == REMOTE for one in named):
        raise ConfigError(f"--draft-endpoint is for drafter '{REMOTE}', which is not among --drafters: add it, or leave this out")
    return [
        replace(one, drafter_options={"endpoint": endpoint, **one.drafter_options}) if one.drafter == REMOTE else one
        for one in named
    ]
