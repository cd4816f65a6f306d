"""The drafters and verifiers that requests may choose from, on one set of loaded models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider.build import Built, Models, assemble
from outrider.decode import Decoder
from outrider.drafters.base import Drafter
from outrider.engine.request import Request, Speculation
from outrider.engine.switch import Switch
from outrider.engine.watch import WatchedControl
from outrider.errors import CapabilityError, ConfigError, did_you_mean
from outrider.parts import Parts
from outrider.settings import parse_settings
from outrider.verifiers import VERIFIERS
from outrider.verifiers.base import Verifier

INVARIANT = "gumbel"


class Lineup:
    """`parts`: by the name a request gives, the first for requests that give none; all on `models`.

    Raises ConfigError when two of them would run the same draft model, CapabilityError for parts that do not fit together.
    """

    def __init__(self, models: Models, parts: Mapping[str, Parts], allow_lossy: Sequence[str] = ()) -> None:
        self._models, self._parts = models, dict(parts)
        self._main = next(iter(self._parts.values()))
        on_draft = [name for name, one in self._parts.items() if one.wants_draft]
        if len(on_draft) > 1:
            raise ConfigError(f"drafters {' and '.join(on_draft)} would run the same draft model; a server takes one of them")
        self._lossy = {name: _lossy(name) for name in allow_lossy}
        self._invariant: Verifier = _made(INVARIANT)
        self._draws_trees = any(one.draws_trees for one in self._parts.values())
        if self._draws_trees and self._main.verifier.shape != "tree":
            self._main = replace(self._main, verifier=VERIFIERS.load("traversal"), verifier_settings=_settings("traversal"))

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    def kv_bytes_per_token(self, drafter: Drafter) -> int:
        """Of target, draft model and what drafters keep of a text besides."""
        models = (self._models.target, self._models.draft)
        caches = [*(model.lm.kv for model in models if model is not None), *drafter.text_caches]
        return sum({id(cache): cache.bytes_per_token for cache in caches}.values())

    def build(self) -> Built:
        """A decoder as new."""
        models = self._models
        built = assemble(models, self._main)
        others = {
            name: parts.make_drafter(models.target, models.draft if parts.wants_draft else None, models.workshop)
            for name, parts in list(self._parts.items())[1:]
        }
        given, drafter = built.decoder, built.decoder.drafter
        if others:
            drafter = Switch({self.names[0]: drafter, **others})
            built.notes.extend(note for other in others.values() for note in other.notes)
        built.decoder = Decoder(given.target, drafter, given.verifier, WatchedControl(given.control, drafter))
        return built

    def choose(self, drafter: Drafter, name: str) -> None:
        """The row that joins next is drafted for by `name`."""
        if isinstance(drafter, Switch):
            drafter.next_owner = name

    def rules_of(self, request: Request) -> tuple[str, Verifier | None]:
        """Who drafts for a request, and its verifier where that is not the decoder's. Raises ConfigError or CapabilityError."""
        asked = request.speculation
        name = asked.drafter or self.names[0]
        if name not in self._parts:
            raise ConfigError(f"speculation.drafter '{name}' is not loaded here.{did_you_mean(name, self.names)}")
        if asked.lossy is not None:
            return name, self._allowed_lossy(asked.lossy)
        if request.params.is_greedy or not request.is_invariant or self._main.verifier.coupled:
            return name, None
        return name, self._invariant

    def is_reproducible(self, request: Request, verifier: Verifier) -> bool:
        """Whether its text follows from prompt, parameters and seed. What a row says that is sampled and not drafter-invariant
        depends on its drafts, and these on the hour: how many there are (the control), whether a compiled loop makes them (not
        beside a row with filters or a grammar), when the draft model has read the prompt, and from what pages."""
        exact = self._models.target.lm.limits.exact_trees or not self._draws_trees
        return exact and verifier.lossless and (request.params.is_greedy or verifier.coupled)

    def bound_of(self, speculation: Speculation) -> tuple[int | None, bool]:
        """(`Row.draft_bound`, `Row.draft_fixed`). Raises ConfigError for more than the drafter was built for."""
        if speculation.mode == "off":
            return 0, True
        most = self._parts[speculation.drafter or self.names[0]].length.most
        bound = speculation.max_draft_tokens
        if bound is not None and bound > most:
            raise ConfigError(f"speculation.max_draft_tokens must be at most {most} on this server, got {bound}")
        return bound, speculation.mode == "fixed"

    def _allowed_lossy(self, name: str) -> Verifier:
        if name in self._lossy:
            return self._lossy[name]
        allowed = f" Allowed: {', '.join(self._lossy)}." if self._lossy else " It allows none: see --allow-lossy."
        raise CapabilityError(f"speculation.lossy '{name}' is not allowed by this server.{allowed}")


def _made(name: str) -> Verifier:
    verifier: type[Verifier] = VERIFIERS.load(name)
    return verifier.build(_settings(name))


def _settings(name: str) -> object:
    return parse_settings(VERIFIERS.load(name).Settings, {}, f"verifier '{name}'")


def _lossy(name: str) -> Verifier:
    verifier = _made(name)
    if verifier.lossless:
        others = [other for other in VERIFIERS.names() if not VERIFIERS.load(other).lossless]
        raise ConfigError(f"verifier '{name}' is lossless, so nobody need allow it; lossy are: {', '.join(others)}")
    return verifier
