"""The engine without HTTP: one request at a time against `LLM.generate`, and what a busy engine
does beside model passes."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.build import Options
from outrider.engine.engine import Engine, make_engine
from outrider.engine.observer import Observer, StepReport
from outrider.engine.request import EngineSettings, Finish, Request, Update

LENGTH = 4  # draft tokens of both sides


class Phases(Observer):
    """Adds up where the engine's time goes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.prefill_s = 0.0

    def begin(self) -> None:
        """Count anew; while nothing runs."""
        self.seconds = {}
        self.prefill_s = 0.0

    def stepped(self, report: StepReport) -> None:
        for phase, seconds in report.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def prefilled(self, request: Request, seconds: float, tokens: int) -> None:
        self.prefill_s += seconds

    def finished(self, request: Request, finish: Finish) -> None:
        """Counted by the caller."""


def ask(engine: Engine, prompts: list[list[int]], tokens: int, tag: str) -> tuple[float, int]:
    """All at once; wall seconds and tokens."""
    over = threading.Semaphore(0)
    total = [0]

    def listen(update: Update) -> None:
        total[0] += len(update.token_ids)
        if update.finish is not None:
            over.release()

    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.submit(Request(id=f"{tag}-{number}", prompt=prompt, params=params), listen)
    for _ in prompts:
        over.acquire()
    return time.perf_counter() - began, total[0]


def engine_part(
    target: Path, draft: Path, prompts: list[list[int]], tokens: int, threads: int, repeats: int = 5
) -> dict[str, Any]:
    """Ratios of the engine to `LLM.generate` one request at a time, and the shares of a busy
    engine's time."""
    how: dict[str, Any] = {
        "draft": str(draft),
        "num_draft_tokens": LENGTH,
        "threads": threads,
        "runtime": "native",
    }
    llm = LLM(target, **how)
    phases = Phases()
    options = Options(target=str(target), **how)
    engine = make_engine(options, EngineSettings(prefix_share=0.0), observer=phases)
    engine.start()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    alone: list[float] = []
    for repeat in range(repeats + 1):
        for number, prompt in enumerate(prompts):
            began = time.perf_counter()
            llm.generate([prompt], params)
            offline = time.perf_counter() - began
            served, _ = ask(engine, [prompt], tokens, f"alone-{repeat}-{number}")
            if repeat:
                alone.append(offline / served)
    busy = {}
    for rows in (1, len(prompts)):
        phases.begin()
        wall = 0.0
        count = 0
        for repeat in range(repeats):
            for start in range(0, len(prompts), rows):
                seconds, emitted = ask(
                    engine, prompts[start : start + rows], tokens, f"busy-{rows}-{repeat}-{start}"
                )
                wall = wall + seconds
                count = count + emitted
        passes = (
            phases.seconds["target"]
            + phases.seconds["draft"]
            + (phases.prefill_s if rows == 1 else 0.0)
        )
        busy[rows] = {
            "tokens_per_s": round(count / wall, 1),
            "wall_s": round(wall, 3),
            "prefill_s": round(phases.prefill_s, 3),
            "step_s": {phase: round(value, 3) for phase, value in phases.seconds.items()},
            "outside_steps": round(1 - sum(phases.seconds.values()) / wall, 4)
            if rows == 1
            else None,
            "outside_passes": round(1 - passes / wall, 4) if rows == 1 else None,
        }
    engine.stop()
    return {
        "served_over_offline": round(statistics.median(alone), 4),
        "runs": len(alone),
        "busy": busy,
    }
