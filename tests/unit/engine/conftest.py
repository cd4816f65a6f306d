"""Small engines on random models, and callers that collect what they are sent."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from outrider.build import Options
from outrider.engine.engine import Engine, make_engine
from outrider.engine.request import EngineSettings, Finish, Request, Speculation, Update
from outrider.sampling.params import SamplingParams
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama

WAIT = 60.0  # seconds that a test waits for an answer before it calls it lost


@dataclass
class Answer:
    """What one listener heard."""

    updates: list[Update] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def __call__(self, update: Update) -> None:
        assert not self.over.is_set(), "an update after the finish"
        self.updates.append(update)
        if update.token_ids:
            self.begun.set()
        if update.finish is not None:
            self.over.set()

    def wait(self) -> Answer:
        assert self.over.wait(WAIT), "the request never finished"
        return self

    @property
    def finish(self) -> Finish:
        finish = self.wait().updates[-1].finish
        assert finish is not None
        return finish

    @property
    def token_ids(self) -> list[int]:
        return [token for update in self.wait().updates for token in update.token_ids]

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.wait().updates)


@dataclass(frozen=True)
class Models:
    target: Path
    draft: Path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A random target and a slightly disturbed copy of it."""
    folder = tmp_path_factory.mktemp("engine")
    target = tiny_llama(257, sharpness=4.0, max_position_embeddings=2048)
    return Models(
        save_checkpoint(folder / "target", target, byte_tokenizer()),
        save_checkpoint(folder / "draft", disturbed(target, 0.05), byte_tokenizer()),
    )


MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine_of(models: Models) -> Iterator[MakeEngine]:
    """Builds and starts engines; every one must be empty and sound at the end."""
    made: list[Engine] = []

    def make(
        *,
        extra: tuple[str, ...] = (),
        lossy: tuple[str, ...] = (),
        start: bool = True,
        observer: Any = None,
        drafter: str = "draft-model",
        draft: bool = True,
        num_draft_tokens: Any = 4,
        runtime: str = "auto",
        prefill: str | None = None,
        **settings: Any,
    ) -> Engine:
        options = Options(
            target=str(models.target),
            draft=str(models.draft) if draft else None,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            runtime=runtime,
            prefill=prefill,
        )
        settings.setdefault("kv_memory", 64 << 20)
        engine = make_engine(
            options,
            EngineSettings(**settings),
            extra_drafters=extra,
            allow_lossy=lossy,
            observer=observer,
        )
        made.append(engine)
        if start:
            engine.start()
        return engine

    yield make
    for engine in made:
        assert engine.drain(WAIT), f"requests are left: {engine.snapshot()}"
        engine.stop()
        assert engine.snapshot().failed is None
        engine.check_integrity()


_ids = (f"request-{number}" for number in itertools.count())


def request(
    prompt: list[int],
    *,
    speculation: Speculation | None = None,
    priority: int = 0,
    timeout_s: float | None = None,
    prompt_logprobs: int | None = None,
    constraint: Any = None,
    prediction: list[int] | None = None,
    **params: Any,
) -> Request:
    """A request with an id of its own."""
    params.setdefault("max_tokens", 24)
    params.setdefault("ignore_eos", True)
    return Request(
        id=next(_ids),
        prompt=prompt,
        params=SamplingParams(**params),
        speculation=speculation or Speculation(),
        priority=priority,
        timeout_s=timeout_s,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        prediction=prediction,
    )


def ask(engine: Engine, *requests: Request) -> list[Answer]:
    """Submit them all; nobody is waited for."""
    answers = []
    for one in requests:
        answers.append(Answer())
        engine.submit(one, answers[-1])
    return answers


def prompt(length: int, seed: int = 0) -> list[int]:
    """Some token ids of the byte tokenizer."""
    return [(seed * 31 + index * 7 + index * index // 3) % 250 + 1 for index in range(length)]
