"""Responses of the target to the prompts, made speculatively by our engine and kept in a file that
an interrupted run continues.

`responses.jsonl` begins with a line about the target and the settings; then one line a text:

    {"outrider_responses": 1, "target": "demo", "vocabulary": "5f3a...", "plan": {...}}
    {"id": "demo-1", "task": "reasoning", "prompt": [1, 17, ...], "response": [9, 4, ..., 2]}

The response ends with the token that ended the text, where one did. `responses=FILE` takes such a
file, or any log that holds answers (docs/workloads.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.errors import CapabilityError, ConfigError, OutriderError, RequestError
from outrider.lab.progress import Progress
from outrider.lab.workload.load import load_workload
from outrider.lab.workload.prompts import PreparedPrompt, end_of_answer, to_tokens
from outrider.lab.workload.types import OnBad
from outrider.llm import LLM
from outrider.sampling.params import SamplingParams
from outrider.train.texts import TrainingText
from outrider.wellformed import parsed_json

VERSION = 1
ROUNDS = 4  # batches of rows per call of the engine: what an interruption costs at most


@dataclass(frozen=True)
class ResponsePlan:
    """How responses are sampled."""

    temperatures: tuple[float, ...] = (0.0, 1.0)  # in turn over prompts and samples
    samples: int = 1  # responses to each prompt
    max_tokens: int = 256
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or self.samples < 1:
            raise ConfigError(
                f"responses need a temperature and at least one sample, got {self.temperatures}, "
                f"{self.samples}"
            )
        self.params(0)

    def params(self, number: int) -> SamplingParams:
        """Sampling parameters of response `number`. Raises ConfigError for a value out of range."""
        return SamplingParams(
            temperature=self.temperatures[number % len(self.temperatures)],
            max_tokens=self.max_tokens,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed * 1_000_003 + number,
        )


def vocabulary_print(tokenizer: Any) -> str:
    """A fingerprint of which id means which text."""
    pairs = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]


class ResponseFile:
    """The file, opened to add to it; what it holds is kept. Raises ConfigError when that is of
    another plan, or damaged."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        self.texts: dict[str, TrainingText] = {}
        self._head = {"outrider_responses": VERSION, **json.loads(json.dumps(head))}
        if path.exists():
            self._read()
        else:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(self._head) + "\n", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    def add(self, text: TrainingText) -> None:
        """On disk when this returns. Raises OutriderError when the disk is full."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(text)) + "\n")
        except OSError as error:
            raise OutriderError(
                f"responses cannot be written to {self.path} ({error.strerror}); "
                f"{len(self.texts)} are kept: make room, then "
                "the same command without --resume"
            ) from error
        self.texts[text.id] = text

    def _read(self) -> None:
        lines = self.path.read_text(encoding="utf-8").split("\n")
        # what follows the last newline is half a line
        head, texts = _parsed(self.path, [line for line in lines[:-1] if line])
        if head != self._head:
            differ = sorted(
                name for name in {*head, *self._head} if head.get(name) != self._head.get(name)
            )
            raise ConfigError(
                f"the responses in {self.path} were made under another plan "
                f"({', '.join(differ)}); give the same options, or "
                "another --out, or use them as they are with --responses"
            )
        self.texts = {text.id: text for text in texts}
        if lines[-1]:
            self.path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")


def regenerate(
    llm: LLM,
    prompts: Sequence[PreparedPrompt],
    plan: ResponsePlan,
    file: ResponseFile,
    batch_size: int,
    progress: Progress,
) -> list[TrainingText]:
    """The target's responses, in the order of the prompts; what `file` has already is not asked
    again."""
    asked = [
        (f"{prompt.request.id}/{sample}", prompt)
        for sample in range(plan.samples)
        for prompt in prompts
    ]
    jobs = [(index, name, prompt) for index, (name, prompt) in enumerate(asked)]
    todo = [job for job in jobs if job[1] not in file.texts]
    progress.stage("regenerating responses", len(jobs))
    progress.skip(len(jobs) - len(todo))
    size = batch_size * ROUNDS
    for start in range(0, len(todo), size):
        chunk = todo[start : start + size]
        params = [_params(plan, index, prompt) for index, _, prompt in chunk]
        fed = [{"prompt_token_ids": prompt.tokens} for *_, prompt in chunk]
        answers = llm.generate(fed, params, use_tqdm=False)
        for (_, name, prompt), done in zip(chunk, answers, strict=True):
            file.add(TrainingText(name, prompt.tokens, done.token_ids, prompt.request.task))
        progress.advance(len(chunk))
    return [file.texts[name] for _, name, _ in jobs]


def _params(plan: ResponsePlan, index: int, prompt: PreparedPrompt) -> SamplingParams:
    params = plan.params(index)
    return replace(params, max_tokens=params.limit(prompt.max_tokens))


def read_responses(
    path: Path,
    tokenizer: Any,
    vocab_size: int,
    *,
    on_bad: OnBad = "refuse",
    chat_template: bool = True,
) -> list[TrainingText]:
    """Texts of a file of ours, or of a log with answers. Raises ConfigError (unreadable, empty, bad
    lines, no answers), and CapabilityError when the tokens are another vocabulary's."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if '"outrider_responses"' not in first:
        return recorded_texts(str(path), tokenizer, on_bad=on_bad, chat_template=chat_template)
    head, texts = _parsed(
        path, [line for line in path.read_text(encoding="utf-8").split("\n") if line]
    )
    if head.get("vocabulary") != vocabulary_print(tokenizer):
        raise CapabilityError(
            f"{path} holds tokens of {head.get('target')}, whose vocabulary is not this target's: "
            "the same ids mean other texts. "
            "Regenerate the responses (leave --responses out)"
        )
    if not texts:
        raise ConfigError(f"{path} holds no responses, only its first line")
    for text in texts:
        if outside := [t for t in text.tokens if not 0 <= t < vocab_size]:
            raise CapabilityError(
                f"{path}: text '{text.id}' has token {outside[0]}, outside the target's "
                f"vocabulary of {vocab_size}"
            )
    return texts


def recorded_texts(
    spec: str,
    tokenizer: Any,
    *,
    limit: int | None = None,
    on_bad: OnBad = "refuse",
    data: Path | None = None,
    chat_template: bool = True,
) -> list[TrainingText]:
    """Requests of a log that have an answer, as the target's tokens; the answer ends with the end
    token. Raises ConfigError."""
    workload = load_workload(spec, limit=limit, on_bad=on_bad, data=data, turns="all")
    texts = []
    for request in workload.requests:
        if not request.answer:
            continue
        try:
            prompt = to_tokens(request, tokenizer, chat_template=chat_template)
        except RequestError as error:
            if on_bad == "refuse":
                raise ConfigError(str(error)) from error
            continue
        response = tokenizer(request.answer, add_special_tokens=False)["input_ids"]
        end = end_of_answer(request, tokenizer, chat_template=chat_template)
        texts.append(
            TrainingText(
                request.id, prompt, response if end is None else [*response, end], request.task
            )
        )
    if not texts:
        raise ConfigError(
            f"none of the {len(workload.requests)} requests of {spec} has an answer; use it with "
            "--prompts instead"
        )
    return texts


def _parsed(path: Path, lines: list[str]) -> tuple[dict[str, Any], list[TrainingText]]:
    texts = []
    head: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = parsed_json(line)
            if number == 1:
                head = dict(entry)
            else:
                texts.append(TrainingText(**entry))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number} is damaged ({error}); delete that line, or begin anew"
            ) from error
    if head.get("outrider_responses") != VERSION:
        raise ConfigError(
            f"{path}, line 1: these are responses of version {head.get('outrider_responses')}, "
            f"not {VERSION}"
        )
    return head, texts
