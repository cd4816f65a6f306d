"""The options of `outrider train`, in groups; each group knows what it means for the library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from outrider.cli.options import MIN_P, SAMPLING, TOP_K, TOP_P
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

    prompts: str | None = option(
        None, TEXTS,
        "Prompts that the target answers: a file, a named workload (docs/workloads.md), several with + between, "
        "or demo:N for N problems of the demo's training split.",
        metavar="FILE_OR_NAME",
    )  # fmt: skip
    responses: Path | None = option(
        None, TEXTS, "Made before: responses.jsonl of a run, or a log with answers.", metavar="FILE"
    )
    from_traffic: str | None = option(
        None, TEXTS, "Recorded requests (an OpenAI log): refresh the drafter of --init.", metavar="LOG"
    )
    recorded_answers: bool = option(False, TEXTS, "Of --from-traffic: train on the recorded answers, ask nothing anew.")
    limit: int | None = option(None, TEXTS, "Most prompts.", min=1, show_default="all")
    on_bad: Literal["refuse", "skip"] = option("refuse", TEXTS, "Bad lines, and prompts that do not fit.")
    data: Path | None = option(None, TEXTS, "Folder with the files of named workloads.")
    chat_template: bool = option(
        True, TEXTS, "Wrap conversations in the model's chat template; false: feed them as plain text."
    )

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

    drafter: str = option("auto", TEXTS, "Who drafts while the target answers: speed only, the texts are its own.")
    temperature: str = option("0,1", SAMPLING, "Of the responses; several with commas take turns.", metavar="T,...")
    responses_per_prompt: int = option(1, SAMPLING, "Responses to each prompt.", min=1)
    max_tokens: int = option(256, SAMPLING, "Max tokens of a response.")
    top_k: int = option(0, SAMPLING, TOP_K)
    top_p: float = option(1.0, SAMPLING, TOP_P)
    min_p: float = option(0.0, SAMPLING, MIN_P)
    max_num_seqs: int = option(8, SAMPLING, "Responses made at once.", min=1)

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

    init: Path | None = option(None, TRAINING, "Go on from this drafter (draft-model: any model).", metavar="DIR")
    kind_option: list[str] | None = option(
        None, TRAINING, "A setting of the kind (docs/train.md lists them); may be given again.", metavar="NAME=VALUE"
    )
    feature_cache: str = option(
        "0", TRAINING, "Keep features of the target on disk, up to so much: 2GB.", metavar="BYTES"
    )

    @property
    def start(self) -> Path | None:
        """The drafter to go on from; 'demo' is the embedded pair's draft."""
        return None if self.init is None else Path(_draft(str(self.init)))

    def settings(self) -> dict[str, str]:
        """The settings of this kind of drafter. Raises ConfigError."""
        found = dict(name_and_value("--kind-option", text) for text in self.kind_option or [])
        return found if "draft" not in found else {**found, "draft": _draft(found["draft"])}


def _draft(name: str) -> str:
    from outrider.build import DEMO
    from outrider.demo import demo_paths

    return str(demo_paths().draft) if name == DEMO else name


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """What is measured in the end."""

    measure_limit: int = option(16, MEASURING, "Held-out prompts of each task; 0: none.", min=0)
    measure_temperature: str = option("0,1", MEASURING, "0 is greedy; several with commas.", metavar="T,...")
    measure_tokens: int = option(128, MEASURING, "Max tokens of an answer.", min=1)

    def plan(self, seed: int) -> MeasurePlan:
        """Raises ConfigError."""
        from outrider.train.measure import MeasurePlan

        temperatures = tuple(numbers("--set measure_temperature", self.measure_temperature, float))
        return MeasurePlan(self.measure_limit, temperatures, self.measure_tokens, seed=seed)
