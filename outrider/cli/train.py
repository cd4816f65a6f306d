"""`outrider train KIND`: from a target and prompts to a trained, measured drafter in one folder."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.cli.lab import (
    INTERRUPTED,
    OUTPUT,
    REPORTS,
    OutputOptions,
    Resume,
    command_line,
    deliver,
    shown_progress,
)
from outrider.cli.options import (
    MIN_P,
    SAMPLING,
    SELDOM_MODEL,
    SELDOM_SAMPLING,
    TOP_K,
    TOP_P,
    MachineOptions,
)
from outrider.cli.prompting import SELDOM_READING
from outrider.cli.session import quieten_libraries
from outrider.cli.typed import check_folder, memory, numbers
from outrider.cli.verbs import gathered, given, listed, option, refuse_unused, written
from outrider.demo import demo_paths
from outrider.errors import ConfigError
from outrider.extras import check_installed
from outrider.train.config import CONFIG_FIELDS, TrainConfig

if TYPE_CHECKING:
    from outrider.train.material import TrainingData
    from outrider.train.measure import MeasurePlan
    from outrider.train.responses import ResponsePlan

TEXTS = "Texts"
TRAINING = "Training"
MEASURING = "Measuring"
OFTEN_SET = ("epochs", "batch_size", "seed")  # flags of their own; the others are one text
GENERATED = re.compile(r"demo:(\d+)")  # problems that the demo pair may train on
Kind = Annotated[
    str,
    typer.Argument(
        help="draft-model, medusa, eagle, eagle3, mtp, block, early-exit or acceptance, with "
        'settings: "eagle3 unrolls=6" '
        "(docs/train.md lists them).",
        show_default=False,
        metavar="KIND",
    ),
]
TargetOption = Annotated[
    str, typer.Option(help="'demo', a local folder, or a hub id.", show_default=False)
]
Out = Annotated[
    Path,
    listed(
        OUTPUT,
        "Folder of the run: 'drafter' is in it, and result.json, of which 'outrider report' makes "
        "pages.",
        show_default=False,
        common=True,
    ),
]
Quick = Annotated[
    bool,
    listed(
        TEXTS,
        "A first head in 2 to 3 minutes: eagle3 for the demo, from 400 of its answers.",
        common=True,
    ),
]
OnlyResponses = Annotated[bool, listed(OUTPUT, "End when the target has answered all prompts.")]


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options that say where training texts come from."""

    prompts: str | None = option(
        None,
        TEXTS,
        "Prompts that the target answers: a file, a named workload (docs/workloads.md), several "
        "with + between, or demo:N for N problems of the demo's training split.",
        metavar="FILE_OR_NAME",
        common=True,
    )
    responses: Path | None = option(
        None, TEXTS, "Made before: responses.jsonl of a run, or a log with answers.", metavar="FILE"
    )
    from_traffic: str | None = option(
        None,
        TEXTS,
        "Recorded requests (an OpenAI log): refresh the drafter of --init.",
        metavar="LOG",
        common=True,
    )
    recorded_answers: bool = option(
        False, TEXTS, "Of --from-traffic: train on the recorded answers, ask nothing anew."
    )
    limit: int | None = option(None, TEXTS, "Most prompts.", min=1, show_default="all", common=True)
    on_bad: Literal["refuse", "skip"] = option(
        "refuse", TEXTS, "Bad lines, and prompts that do not fit."
    )
    data: Path | None = option(None, TEXTS, "Folder with the files of named workloads.")
    chat_template: bool = option(
        True, TEXTS, "Wrap conversations in the model's chat template, or feed them as plain text."
    )

    def material(self, out: Path) -> TrainingData:
        """The texts to train on. Raises ConfigError."""
        from outrider.train.material import TrainingData

        match = GENERATED.fullmatch(self.prompts or "")
        prompts = str(_generated(int(match[1]), out)) if match else self.prompts
        return TrainingData(
            prompts=prompts,
            responses=self.responses,
            traffic=self.from_traffic,
            recorded_answers=self.recorded_answers,
            limit=self.limit,
            on_bad=self.on_bad,
            chat_template=self.chat_template,
            data=self.data,
        )


def _generated(count: int, out: Path) -> Path:
    """A file of problems next to the run. A run that is there already keeps its own."""
    from outrider.demo.training import training_prompts

    path = out / "prompts.jsonl"
    if count < 2:
        raise ConfigError(f"--prompts demo:{count}: at least two prompts are needed")
    if not (out / "config.json").exists():
        lines = [
            json.dumps({"prompt": prompt, "task": "reasoning"})
            for prompt in training_prompts(count)
        ]
        try:
            out.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    return path


@dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """How the target answers."""

    drafter: str = option(
        "auto",
        TEXTS,
        "Who drafts while the target answers: speed only, the texts are its own.",
        common=True,
    )
    temperature: str = option(
        "0,1",
        SAMPLING,
        "Of the responses; several with commas take turns.",
        metavar="T,...",
        common=True,
    )
    responses_per_prompt: int = option(1, SAMPLING, "Responses to each prompt.", min=1)
    max_tokens: int = option(256, SAMPLING, "Max tokens of a response.", common=True)
    top_k: int = option(0, SAMPLING, TOP_K)
    top_p: float = option(1.0, SAMPLING, TOP_P)
    min_p: float = option(0.0, SAMPLING, MIN_P)
    max_num_seqs: int = option(8, SAMPLING, "Responses made at once.", min=1)

    def plan(self, seed: int) -> ResponsePlan:
        """How the target's answers are made. Raises ConfigError."""
        from outrider.train.responses import ResponsePlan

        return ResponsePlan(
            temperatures=tuple(numbers("--temperature", self.temperature, float)),
            samples=self.responses_per_prompt,
            max_tokens=self.max_tokens,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class KindOptions:
    """The model to train and where it begins; how is in `TrainConfig`."""

    init: Path | None = option(
        None,
        TRAINING,
        "Go on from this drafter (draft-model: any model).",
        metavar="DIR",
        common=True,
    )
    feature_cache: str = option(
        "0", TRAINING, "Keep features of the target on disk, up to so much: 2GB.", metavar="BYTES"
    )

    @property
    def start(self) -> Path | None:
        """The drafter to continue from; 'demo' is the embedded pair's draft."""
        return None if self.init is None else Path(_draft(str(self.init)))


def _draft(name: str) -> str:
    from outrider import build

    return str(demo_paths().draft) if name == build.DEMO else name


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """The measurements after training."""

    measure_limit: int = option(16, MEASURING, "Held-out prompts of each task; 0: none.", min=0)
    measure_temperature: str = option(
        "0,1", MEASURING, "0 is greedy; several with commas.", metavar="T,..."
    )
    measure_tokens: int = option(128, MEASURING, "Max tokens of an answer.", min=1)

    def plan(self, seed: int) -> MeasurePlan:
        """How the trained drafter is measured. Raises ConfigError."""
        from outrider.train.measure import MeasurePlan

        temperatures = tuple(
            numbers("--measuring measure_temperature", self.measure_temperature, float)
        )
        return MeasurePlan(self.measure_limit, temperatures, self.measure_tokens, seed=seed)


@gathered(
    sampling=(*SELDOM_SAMPLING, "responses_per_prompt", "max_num_seqs"),
    model_options=SELDOM_MODEL,
    reading=(*SELDOM_READING, "recorded_answers"),
    training=(*(name for name in CONFIG_FIELDS if name not in OFTEN_SET), "feature_cache"),
    measuring=("measure_limit", "measure_temperature", "measure_tokens"),
)
def train(
    kind: Kind,
    target: TargetOption,
    out: Out,
    texts: TextOptions,
    answers: ResponseOptions,
    which: KindOptions,
    training: TrainConfig,
    machine: MachineOptions,
    measuring: MeasuringOptions,
    quick: Quick = False,
    resume: Resume = False,
    only_responses: OnlyResponses = False,
) -> int:
    """Train a drafter for a target: its responses, its features, training, before and after."""
    check_installed("training", "train")
    from outrider import build
    from outrider.configuration import name_and_options
    from outrider.train.run import TrainSpec, run_training

    name, settings = name_and_options(
        kind, "KIND begins with the name of a kind, like eagle3 or 'eagle3 unrolls=6'"
    )
    plan = measuring.plan(training.seed)
    if quick:
        from outrider.train import quick as quick_run

        quick_run.check(name, settings, target)
        decided = given(texts, answers, which, training, measuring)
        refuse_unused(
            [option for option in decided if option != written("seed")],
            "with --quick, which decides it",
        )
        settings = quick_run.SETTINGS
        texts = replace(texts, prompts=f"demo:{quick_run.NUM_PROMPTS}")
        training = quick_run.config(training)
        plan = replace(quick_run.MEASURED, seed=training.seed)
    if "draft" in settings:
        settings["draft"] = _draft(settings["draft"])

    if out.suffix in REPORTS:
        raise ConfigError(
            f"--out is the run's folder; 'outrider report FOLDER/result.json --out {out.name}' "
            "makes pages"
        )
    check_folder(out)
    asking = [*given(answers), *(["--draft"] if machine.draft is not None else [])]
    if texts.from_traffic is None and texts.prompts is None:
        refuse_unused(asking, "without --prompts or --from-traffic")
    if texts.recorded_answers:
        refuse_unused(asking, "with --reading recorded_answers=true, which asks the target nothing")
    options = replace(
        machine.options(target), drafter=answers.drafter, max_num_seqs=answers.max_num_seqs
    )
    if target == build.DEMO:
        options = replace(options, target=str(demo_paths().target))
    spec = TrainSpec(
        kind=name,
        options=options,
        name=target,
        out=out,
        material=texts.material(out),
        responses=answers.plan(training.seed),
        init=which.start,
        settings=settings,
        config=training,
        feature_cache=memory("--training feature_cache", which.feature_cache, or_none=True),
        measure=plan,
        resume=resume,
        only_responses=only_responses,
    )
    quieten_libraries()
    if quick:
        sys.stderr.write(f"{quick_run.announcement()}\n")
    try:
        with shown_progress() as progress:
            result = run_training(spec, progress, command_line())
    except KeyboardInterrupt:
        sys.stderr.write(
            f"interrupted; what is finished is in {out}: the same command with --resume continues\n"
        )
        return INTERRUPTED
    if result is not None:
        deliver(result, OutputOptions())
        sys.stderr.write(f"written: {out / 'drafter'}, {out / 'result.json'}\n")
        if quick:
            sys.stderr.write(f"try it: {quick_run.command_to_try(out / 'drafter')}\n")
    return 0
