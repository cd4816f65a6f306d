"""The texts of a run: prompts that the target answers, a file of responses, or recorded traffic."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.build import Options
from outrider.errors import ConfigError, counted
from outrider.lab.progress import Progress
from outrider.lab.workload.load import load_workload
from outrider.lab.workload.prompts import prepare
from outrider.lab.workload.types import OnBad
from outrider.llm import LLM
from outrider.train.responses import (
    ResponseFile,
    ResponsePlan,
    read_responses,
    recorded_texts,
    regenerate,
    vocabulary_print,
)
from outrider.train.texts import TrainingText

RESPONSES = "responses.jsonl"


@dataclass(frozen=True)
class TrainingData:
    """Exactly one of `prompts`, `responses` and `traffic`."""

    prompts: str | None = None  # a workload: file or name (lab/workload/load.py)
    responses: Path | None = None  # made before: a file of ours, or a log with answers
    traffic: str | None = None  # recorded requests (an OpenAI log), to refresh a drafter with
    # of traffic: train on what was answered then, instead of answering anew
    recorded_answers: bool = False
    limit: int | None = None  # most prompts
    on_bad: OnBad = "refuse"
    chat_template: bool = True
    data: Path | None = None  # folder of named workloads

    def check(self, init: Path | None) -> None:
        """Raises ConfigError for a combination that means nothing."""
        given = [
            name for name in ("prompts", "responses", "traffic") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            what = " and ".join(given) if given else "none of them"
            raise ConfigError(
                f"texts come from one of --prompts, --responses and --from-traffic; got {what}"
            )
        if self.traffic is not None and init is None:
            raise ConfigError("--from-traffic refreshes a drafter: name it with --init FOLDER")
        if self.recorded_answers and self.traffic is None:
            raise ConfigError(
                "recorded answers are those of --from-traffic; give --responses FILE for a file "
                "of answers"
            )
        if init is not None and not init.is_dir():
            raise ConfigError(f"--init: there is no folder '{init}'")

    @property
    def needs_target(self) -> bool:
        """Whether the target has to answer first."""
        return self.responses is None and not self.recorded_answers

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }


def gather(
    material: TrainingData,
    options: Options,
    name: str,
    tokenizer: Any,
    plan: ResponsePlan,
    out: Path,
    progress: Progress,
) -> tuple[list[TrainingText], list[str]]:
    """(texts, notes for a person). Responses that have to be made are kept in `out`. Raises
    ConfigError, CapabilityError."""
    if material.responses is not None:
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        texts = read_responses(
            material.responses,
            tokenizer,
            vocab_size,
            on_bad=material.on_bad,
            chat_template=material.chat_template,
        )[: material.limit]
        return texts, [
            f"responses: {len(texts)} of {material.responses}, not checked to be the target's own"
        ]
    if material.traffic is not None and material.recorded_answers:
        texts = recorded_texts(
            material.traffic,
            tokenizer,
            limit=material.limit,
            on_bad=material.on_bad,
            data=material.data,
            chat_template=material.chat_template,
        )
        return texts, [
            f"{len(texts)} recorded answers of {material.traffic}, not checked to be the target's own"
        ]
    spec = material.prompts or material.traffic or ""
    workload = load_workload(spec, limit=material.limit, on_bad=material.on_bad, data=material.data)
    with LLM(**asdict(options), status=progress.say) as llm:
        context = llm.config["max_model_len"]
        prepared = prepare(
            workload,
            tokenizer,
            context=context,
            max_tokens=plan.max_tokens,
            on_bad=material.on_bad,
            chat_template=material.chat_template,
        )
        head = {
            "target": name,
            "vocabulary": vocabulary_print(tokenizer),
            "plan": asdict(plan),
            "prompts": spec,
        }
        file = ResponseFile(out / RESPONSES, head)
        texts = regenerate(llm, prepared.prompts, plan, file, options.max_num_seqs, progress)
    gc.collect()
    skipped = len(workload.skipped) + len(prepared.skipped)
    notes = [*workload.notes, *([f"skipped {counted(skipped, 'prompt')}"] if skipped else [])]
    return texts, notes
