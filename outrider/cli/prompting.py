"""Which prompts are asked, and how their answers are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from outrider.cli.options import MIN_P, SAMPLING, TOP_K, TOP_P
from outrider.cli.verbs import option
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.lab.workload.types import Turns, Workload
    from outrider.sampling.params import SamplingParams

PROMPTS = "Prompts"
SELDOM_READING = ("on_bad", "chat_template", "turns", "data")  # in one text: `verbs.gathered`


def source(otherwise: str) -> Any:
    """The option `--prompts`; `otherwise`: which prompts are taken without it, where the target is
    not the demo's."""
    return option(
        None,
        PROMPTS,
        "A prompts file, a built-in name (docs/workloads.md), several with + between.",
        metavar="FILE_OR_NAME",
        show_default=f"demo for the demo target, else {otherwise}",
        common=True,
    )


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Which prompts."""

    otherwise: ClassVar[str] = "embedded:reasoning"

    prompts: str | None = source(otherwise)
    limit: int = option(16, PROMPTS, "Most prompts of each task.", min=1, common=True)
    data: Path | None = option(None, PROMPTS, "Folder with the files of named workloads.")
    on_bad: Literal["refuse", "skip"] = option(
        "refuse", PROMPTS, "Bad lines, and prompts that do not fit."
    )

    def load(self, target: str, limit: int | None = None) -> Workload:
        """All of them, or at most `limit`. Raises ConfigError."""
        return self._load(target, limit, "auto")

    def _load(self, target: str, limit: int | None, turns: Turns) -> Workload:
        from outrider.lab.workload.load import load_workload

        if self.prompts is not None and self.prompts.isdigit():
            raise ConfigError(
                f"--prompts takes a file or a name; a number of prompts is --limit {self.prompts}"
            )
        name = self.prompts or ("demo" if target == "demo" else self.otherwise)
        return load_workload(name, limit=limit, on_bad=self.on_bad, data=self.data, turns=turns)


@dataclass(frozen=True, kw_only=True)
class ConversationOptions(PromptOptions):
    """Which prompts, and how conversations are sent."""

    chat_template: bool = option(
        True,
        PROMPTS,
        "Wrap conversations in the model's chat template, or send them as plain text.",
    )
    turns: Literal["auto", "first", "all"] = option(
        "auto",
        PROMPTS,
        "Of conversations: their first questions; all; auto: all but of recorded ones.",
    )

    def load(self, target: str, limit: int | None = None) -> Workload:
        return self._load(target, limit, self.turns)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers of measured prompts are sampled."""

    max_tokens: int = option(128, SAMPLING, "Max tokens of an answer.", common=True)
    temperature: str = option(
        "0", SAMPLING, "0 is greedy; several with commas.", metavar="T,...", common=True
    )
    top_k: int = option(0, SAMPLING, TOP_K)
    top_p: float = option(1.0, SAMPLING, TOP_P)
    min_p: float = option(0.0, SAMPLING, MIN_P)
    ignore_eos: bool = option(
        False, SAMPLING, "Generate past the end of the text, so that batches stay full."
    )
    seed: int = option(
        0, SAMPLING, "Of sampled texts and of the order of batches.", min=0, common=True
    )

    def params(self, temperature: float = 0.0) -> SamplingParams:
        """The sampling options as parameters of a request. Raises ConfigError for a value out of
        range."""
        from outrider.sampling.params import SamplingParams

        return SamplingParams(
            temperature=temperature,
            max_tokens=self.max_tokens,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            ignore_eos=self.ignore_eos,
        )
