"""The interface between the HTTP side and an engine."""

from __future__ import annotations

from typing import Any, Protocol

from outrider.engine.observer import EngineSnapshot
from outrider.engine.request import Listener, Request
from outrider.models.loading.generation_config import SamplingDefaults
from outrider.sampling.params import SamplingParams


class Serves(Protocol):
    """The part of `Engine` that the HTTP side uses."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def context(self) -> int: ...

    @property
    def drafters(self) -> list[str]: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def lossless(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...

    @property
    def is_demo(self) -> bool: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def sampling_defaults(self) -> SamplingDefaults: ...

    def check_room(self, count: int) -> None: ...

    def prepare(self, params: SamplingParams) -> None: ...

    def submit(self, request: Request, listener: Listener) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def snapshot(self) -> EngineSnapshot: ...

    def drain(self, timeout_s: float) -> bool: ...

    def stop(self) -> None: ...
