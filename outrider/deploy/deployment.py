"""What is to be deployed, where it listens and what it may use."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.deploy.source import DraftSource
from outrider.errors import CapabilityError, ConfigError
from outrider.lab.tune.engine_advice import Engine, EngineAdvice, EngineChoice

LABEL = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")  # of Kubernetes, with room for a suffix
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One server. Raises ConfigError for values out of range."""

    source: DraftSource
    advice: EngineAdvice  # `source` in other engines' words
    served_name: str  # what clients call the model
    name: str  # of the service
    host: str
    port: int
    image: str
    cpus: int
    memory_bytes: int
    gpus: int
    replicas: int  # at least
    max_replicas: int
    queue: int  # waiting requests of a replica from which on there should be another one
    namespace: str | None
    models_claim: str  # volume claim with the models

    def __post_init__(self) -> None:
        for what, value in (("--name", self.name), ("namespace", self.namespace), ("models_claim", self.models_claim)):
            if value is not None and not LABEL.fullmatch(value):
                raise ConfigError(
                    f"{what} takes small letters, digits and '-', beginning with a letter, 50 at most; got '{value}'"
                )
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 1 and 65535, got {self.port}")
        if self.max_replicas < self.replicas:
            raise ConfigError(f"--max-replicas must be at least --replicas: {self.replicas}; got {self.max_replicas}")
        if not self.image.strip() or set(self.image) & set(" \t\n"):
            raise ConfigError(f"--image takes the name of an image, like outrider:cpu; got '{self.image}'")
        if self.memory_bytes < 256 * MIB:
            raise ConfigError(f"--memory must be at least 256MiB, got {self.memory_bytes / MIB:.0f} MiB")

    def ask(self, engine: Engine) -> tuple[EngineChoice | None, list[str]]:
        """How another engine drafts, None for plain decoding, and notes. Raises CapabilityError where it cannot do what settings
        state."""
        choice, notes = self.advice.ask(engine)
        if choice is None and self.source.result is None and self.advice.speculate:
            raise CapabilityError(f"{engine.name}: {notes[0]}")
        return choice, notes

    @property
    def memory_mib(self) -> int:
        """The memory limit in MiB, rounded down."""
        return self.memory_bytes // MIB

    @property
    def headline(self) -> str:
        """One line: what is served and how it drafts."""
        how = self.source.settings.options.get("drafter", "auto")
        drafts = f"drafter '{how}'" if self.advice.speculate else "plain decoding"
        return f"{self.source.settings.target}: {drafts}. {self.source.settings.why}".strip()


def label_of(target: str) -> str:
    """A service name for a target: its last part in the letters that such names may have."""
    last = re.sub(r"[^a-z0-9]+", "-", target.rstrip("/").rpartition("/")[2].lower()).strip("-")
    return f"outrider-{last[:40].strip('-')}" if last else "outrider"
