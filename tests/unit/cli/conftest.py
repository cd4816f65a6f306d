"""A command line without models: `cli(...)` runs one command, `FakeLLM` answers from a script."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from outrider.cli import app, session
from outrider.cli.options import ModelOptions
from outrider.errors import ConfigError
from outrider.models.loading.generation_config import SamplingDefaults
from outrider.outputs import Completion, StreamChunk
from outrider.stats import DecodeStats

STEPS = (
    (["Paris", " is"], ["accepted", "correction"]),
    ([" the", " capital"], ["accepted", "accepted"]),
    ([".\n"], ["bonus"]),
)


@dataclass
class FakeLLM:
    """What the verbs see of `outrider.LLM`. `on_step` may raise, or press Ctrl-C, before step i is
    shown."""

    on_step: Callable[[int], None] = lambda number: None
    has_chat_template: bool = True
    prompts: list[Any] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    predictions: list[str | None] = field(default_factory=list)
    closed: bool = False
    finish_reason: str = "stop"
    last_completion: Completion | None = None
    config: dict[str, Any] = field(
        default_factory=lambda: {
            "target": "fake",
            "threads": 1,
            "max_model_len": 100,
            "drafter": "ngram",
            "draft": None,
            "num_draft_tokens": 5,
            "verifier": "block",
            "lossless": True,
        }
    )
    memory: dict[str, Any] = field(
        default_factory=lambda: {
            "target": {"kv_bytes_per_token": 2048},
            "draft": None,
            "heads": (),
            "weights_bytes": 1 << 20,
            "draft_bytes": 0,
        }
    )
    versions: dict[str, str] = field(default_factory=lambda: {"outrider": "0"})
    notes: list[str] = field(default_factory=list)
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    generation_configs: list[str] = field(default_factory=list)
    notes_wanted: bool = True
    refused: str | None = None  # a role that the template does not know

    control: ClassVar[dict[str, Any]] = {"fixed": 5}
    drafter_summary: ClassVar[list[str]] = []
    drafter_counters: ClassVar[dict[str, float]] = {}

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to save."""

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.has_chat_template:
            raise ConfigError("'fake' has no chat template; use generate with a plain prompt")
        if any(message["role"] == self.refused for message in messages):
            raise ConfigError(f"no {self.refused} here")
        return [len(json.dumps(messages))]

    def stream(
        self, prompt: Any, params: Any, *, prediction: str | None = None
    ) -> Iterator[StreamChunk]:
        self.prompts.append(prompt)
        self.params.append(params)
        self.predictions.append(prediction)
        pieces: list[str] = []
        origins: list[str] = []
        stats = DecodeStats(ttft_s=0.5, decode_s=0.5)
        try:
            for number, (new, kinds) in enumerate(STEPS):
                self.on_step(number)
                pieces = pieces + new
                origins = origins + kinds
                stats.count_step(
                    2, kinds.count("accepted"), len(new), rejected=kinds.count("accepted") < 2
                )
                chunk = StreamChunk("".join(new), list(range(len(new))), kinds, new)
                if number == len(STEPS) - 1:
                    chunk.completion = self._completion(
                        pieces, origins, stats, self.finish_reason, params
                    )
                yield chunk
        finally:
            self.closed = True
            self.last_completion = self._completion(pieces, origins, stats, "abort", params)

    def _completion(
        self, pieces: list[str], origins: list[str], stats: DecodeStats, reason: str, params: Any
    ) -> Completion:
        logprobs = None if params.logprobs is None else [{0: -0.5, 1: float("-inf")}] * len(pieces)
        ids = list(range(len(pieces)))
        return Completion(
            [1],
            "".join(pieces),
            ids,
            reason,
            origins,
            logprobs,
            stats,
            lossless=True,
            seed=params.seed or 7,
            verifier="gumbel",
        )


@dataclass
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """The model every verb gets; `fake.asked` holds (target, options) of each request for one."""
    llm = FakeLLM()
    asked: list[tuple[str, ModelOptions]] = []
    llm.asked = asked

    def load(
        target: str, options: ModelOptions, generation_config: str = "none", *, notes: bool = True
    ) -> FakeLLM:
        asked.append((target, options))
        llm.generation_configs.append(generation_config)
        llm.notes_wanted = notes
        return llm

    monkeypatch.setattr(session, "load_llm", load)
    return llm


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run one command line in this process. `stdin` is piped text; None is a terminal nobody types
    at."""

    def run(*arguments: str, stdin: str | bytes | None = None) -> Outcome:
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
        stream.isatty = lambda: stdin is None
        monkeypatch.setattr(sys, "stdin", stream)
        code = app.run(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
