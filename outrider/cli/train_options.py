"""The options of `outrider train`, in groups; each group knows what it means for the library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from outrider.cli.options import SAMPLING, MinP, TopK, TopP
from outrider.cli.quantities import numbers
from outrider.cli.verbs import name_and_value, option
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.train.material import TrainingData
    from outrider.train.measure import MeasurePlan
    from outrider.train.responses import ResponsePlan

TEXTS, TRAINING, MEASURING = "Texts", "Training", "Measuring"
GENERATED = re.compile(r"demo:(\d+)")  # problems that the demo pair may train on


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options that say where training texts come from."""

    prompts: Annotated[
        str | None,
        option(
            TEXTS, "Prompts that the target answers: a file, a named workload (docs/workloads.md), several with + between, or "
            "demo:N for N problems of the demo's training split.", metavar="FILE_OR_NAME", show_default=False,
        ),
    ] = None  # fmt: skip
    responses: Annotated[
        Path | None,
        option(TEXTS, "Made before: responses.jsonl of a run, or a log with answers.", metavar="FILE", show_default=False),
    ] = None
    from_traffic: Annotated[
        str | None,
        option(TEXTS, "Recorded requests (an OpenAI log): refresh the drafter of --init.", metavar="LOG", show_default=False),
    ] = None
    recorded_answers: Annotated[
        bool, option(TEXTS, "Of --from-traffic: train on the recorded answers, ask nothing anew.")
    ] = False
    limit: Annotated[int | None, option(TEXTS, "Most prompts.", min=1, show_default="all")] = None
    on_bad: Annotated[Literal["refuse", "skip"], option(TEXTS, "Bad lines, and prompts that do not fit.")] = "refuse"
    data: Annotated[Path | None, option(TEXTS, "Folder with the files of named workloads.", show_default=False)] = None
    chat_template: Annotated[
        bool, option(TEXTS, "Wrap conversations in the model's chat template; false: feed them as plain text.")
    ] = True

    def material(self, out: Path) -> TrainingData:
        """Raises ConfigError."""
        from outrider.train.material import TrainingData

        match = GENERATED.fullmatch(self.prompts or "")
        prompts = str(_generated(int(match[1]), out)) if match else self.prompts
        return TrainingData(
            prompts=prompts, responses=self.responses, traffic=self.from_traffic, recorded_answers=self.recorded_answers,
            limit=self.limit, on_bad=self.on_bad, chat_template=self.chat_template, data=self.data,
        )  # fmt: skip


def _generated(count: int, out: Path) -> Path:
    """A file of problems beside the run. A run that is there already keeps its own."""
    from json import dumps

    from outrider.demo.training import training_prompts

    path = out / "prompts.jsonl"
    if count < 2:
        raise ConfigError(f"--prompts demo:{count}: at least two prompts are needed")
    if not (out / "config.json").exists():
        lines = [dumps({"prompt": prompt, "task": "reasoning"}) for prompt in training_prompts(count)]
        try:
            out.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    return path


@dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """How the target answers."""

    drafter: Annotated[str, option(TEXTS, "Who drafts while the target answers: speed only, the texts are its own.")] = "auto"
    temperature: Annotated[str, option(SAMPLING, "Of the responses; several with commas take turns.", metavar="T,...")] = "0,1"
    responses_per_prompt: Annotated[int, option(SAMPLING, "Responses to each prompt.", min=1)] = 1
    max_tokens: Annotated[int, option(SAMPLING, "Max tokens of a response.")] = 256
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    max_num_seqs: Annotated[int, option(SAMPLING, "Responses made at once.", min=1)] = 8

    def plan(self, seed: int) -> ResponsePlan:
        """Raises ConfigError."""
        from outrider.train.responses import ResponsePlan

        return ResponsePlan(
            temperatures=tuple(numbers("--temperature", self.temperature, float)), samples=self.responses_per_prompt,
            max_tokens=self.max_tokens, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=seed,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KindOptions:
    """What is trained, from where on; how is in `TrainConfig`."""

    init: Annotated[
        Path | None, option(TRAINING, "Go on from this drafter (draft-model: any model).", metavar="DIR", show_default=False)
    ] = None
    kind_option: Annotated[
        list[str] | None,
        option(
            TRAINING, "A setting of the kind (docs/train.md lists them); may be given again.", metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = None  # fmt: skip
    feature_cache: Annotated[
        str, option(TRAINING, "Keep features of the target on disk, up to so much: 2GB.", metavar="BYTES")
    ] = "0"

    def settings(self) -> dict[str, str]:
        """The settings of this kind of drafter. Raises ConfigError."""
        return dict(name_and_value("--kind-option", text) for text in self.kind_option or [])


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """What is measured in the end."""

    measure_limit: Annotated[int, option(MEASURING, "Held-out prompts of each task; 0: none.", min=0)] = 16
    measure_temperature: Annotated[str, option(MEASURING, "0 is greedy; several with commas.", metavar="T,...")] = "0,1"
    measure_tokens: Annotated[int, option(MEASURING, "Max tokens of an answer.", min=1)] = 128

    def plan(self, seed: int) -> MeasurePlan:
        """Raises ConfigError."""
        from outrider.train.measure import MeasurePlan

        temperatures = tuple(numbers("--set measure_temperature", self.measure_temperature, float))
        return MeasurePlan(self.measure_limit, temperatures, self.measure_tokens, seed=seed)
