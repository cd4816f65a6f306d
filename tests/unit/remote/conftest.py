"""The demo pair for drafters that ask a service, loaded once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider.build import Models, Options, assemble, load_models
from outrider.llm import LLM
from outrider.options import Needs
from outrider.outputs import Completion
from outrider.parts import choose_parts
from outrider.remote.draft import connection
from outrider.remote.draft.connection import CONNECTIONS
from outrider.remote.draft.drafter import RemoteDrafter
from outrider.remote.draft.text import DraftWait
from outrider.sampling.params import SamplingParams

PROMPTS = (
    "Tom has 3 apples and buys 4 more. How many",
    "Anna has 12 pens. She gives 5",
    "A box holds 6 eggs. How many",
)
GREEDY = SamplingParams(max_tokens=28, ignore_eos=True)
INVARIANT = SamplingParams(max_tokens=28, ignore_eos=True, temperature=1.0, top_p=0.9, seed=5)


@dataclass
class Demo:
    """The demo target with drafters around it."""

    models: Models
    # "greedy", "invariant": whole texts in one process, without a drafter
    plain: dict[str, list[list[int]]]

    def llm(
        self, drafter: str = "none", verifier: str = "auto", k: int | str = 4, **options: Any
    ) -> LLM:
        """One with its own decoder; `close` it."""
        parts = choose_parts(drafter, options, verifier, {}, k, lossy=False)
        return LLM.around(assemble(self.models, parts))

    def remote(self, address: str, verifier: str = "auto", k: int | str = 4, **options: Any) -> LLM:
        """With drafter 'remote'."""
        return self.llm("remote", verifier, k, endpoint=address, **options)

    def texts(self, kind: str, llm: LLM) -> list[list[int]]:
        """Prompts and answers."""
        done: list[Completion] = llm.generate(
            list(PROMPTS), GREEDY if kind == "greedy" else INVARIANT
        )
        return [answer.prompt_token_ids + answer.token_ids for answer in done]


@pytest.fixture(scope="session")
def demo() -> Demo:
    """In the checkpoint's numbers."""
    pair = Demo(load_models(Options("demo", threads=1), Needs()), {})
    for kind, verifier in (("greedy", "auto"), ("invariant", "gumbel")):
        pair.plain[kind] = pair.texts(kind, pair.llm(verifier=verifier))
    return pair


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are mended at once."""
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S", "DISTRUST_PAUSE_S", "LONGEST_DISTRUST_S"):
        monkeypatch.setattr(connection, name, 0.02)


@pytest.fixture(autouse=True)
def _no_connection_outlives_its_test() -> Iterator[None]:
    yield
    assert not CONNECTIONS, "a drafter was not closed"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step waits for its draft, up to ten seconds: what a test counts depends on no clock."""
    monkeypatch.setattr(DraftWait, "budget_s", property(lambda self: 10.0))
    monkeypatch.setattr(
        DraftWait,
        "expects",
        lambda self, asked_s, silent_since_s, now_s, deadline_s: now_s < deadline_s,
    )


def drafter_of(llm: LLM) -> RemoteDrafter:
    """The remote drafter of an engine or decoder."""
    drafter = llm._decoder.drafter
    assert isinstance(drafter, RemoteDrafter)
    return drafter


Service = Callable[..., Any]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short enough for a socket's path."""
    return tmp_path_factory.mktemp("s")


WAIT_S = 30.0  # before a test calls something lost


def until(holds: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
    """Wait until something holds; fails after `seconds`."""
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
