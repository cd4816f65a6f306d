"""The drafters and verifiers that requests may choose from, on one set of loaded models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider.admission import checked_prediction
from outrider.build import Built, Models, assemble
from outrider.decode import Decoder
from outrider.draft_length import AutoLength
from outrider.draft_length.reading import ReadingPrice
from outrider.drafters.base import SMALL_TREE, Drafter
from outrider.engine.draft_prefill import DraftPrefill
from outrider.engine.drafter_mux import FOLLOWER, DrafterMux
from outrider.engine.request import Request
from outrider.errors import CapabilityError, ConfigError, did_you_mean
from outrider.kv import KVCache
from outrider.kv.view import BorrowedCache
from outrider.parts import Parts, choose_parts
from outrider.rows import Row, RowVerifier
from outrider.settings import parse_settings
from outrider.step import Control
from outrider.verifiers import VERIFIERS
from outrider.verifiers.base import Verifier
from outrider.verifiers.invariant import invariant_verifier

# draft tokens that a request with a prediction may ask for: with the pending one a pass of 32
LONGEST_COPY = 31


class DrafterPool:
    """`parts`: by the name a request gives, the first for requests that give none; all on `models`.

    Raises ConfigError when two of them would run the same draft model, CapabilityError for parts
    that do not fit together.
    """

    def __init__(
        self, models: Models, parts: Mapping[str, Parts], allow_lossy: Sequence[str] = ()
    ) -> None:
        self._models = models
        self._parts = dict(parts)
        self._main = next(iter(self._parts.values()))
        self._follower = choose_parts(FOLLOWER, {}, "auto", {}, LONGEST_COPY, lossy=False)
        on_draft = [name for name, one in self._parts.items() if one.requirements.draft]
        if len(on_draft) > 1:
            raise ConfigError(
                f"drafters {' and '.join(on_draft)} would run the same draft model; a server "
                "takes one of them"
            )
        self._lossy = {name: lossy_verifier(name) for name in allow_lossy}
        # drafters whose sampled rows are verified with shared noise
        self._by_noise: set[str] = set()
        self._draws_trees = any(part.requirements.trees for part in self._parts.values())
        if self._draws_trees and self._main.verifier.shape != "tree":
            self._main = replace(
                self._main,
                verifier=VERIFIERS.load("traversal"),
                verifier_settings=_settings("traversal"),
            )

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    @property
    def parts(self) -> dict[str, Parts]:
        """By name."""
        return dict(self._parts)

    def caches(self, drafter: Drafter) -> list[KVCache]:
        """All that takes memory for texts: caches of target, draft model, heads, and further state
        that drafters keep of a text."""
        models = (self._models.target, self._models.draft)
        caches = [*(model.lm.kv for model in models if model is not None), *drafter.caches]
        return list(
            {id(cache): cache for cache in caches if not isinstance(cache, BorrowedCache)}.values()
        )

    def build(self, control: Control | None = None) -> Built:
        """A decoder as new; with `control`, and what it has learned, where there is one."""
        models = self._models
        built = assemble(models, self._main)
        others = {
            name: parts.make_drafter(
                models.target, models.draft if parts.requirements.draft else None
            )
            for name, parts in list(self._parts.items())[1:]
        }
        given = built.decoder
        drafter = built.decoder.drafter
        built.notes.extend(note for other in others.values() for note in other.notes)
        members = {self.names[0]: drafter, **others}
        named = self._main.is_verifier_named
        self._by_noise = {
            name for name, member in members.items() if member.prefers_shared_noise and not named
        }
        for name, other in others.items():
            if models.prefill is not None:
                models.prefill.check_drafter(self._parts[name].requirements, other)
        drafter = DrafterMux(
            {FOLLOWER: self._follower.make_drafter(models.target, None), **members}, self.names[0]
        )
        control = control or self._each(given.control)
        if isinstance(control, AutoLength):
            control.reading = ReadingPrice(drafter.unread)
        built.decoder = Decoder(
            given.target,
            drafter,
            given.verifier,
            DraftPrefill(drafter, control),
            max(parts.length.max_nodes for parts in self._parts.values()),
        )
        built.decoder.prefill = models.prefill
        return built

    def choose(self, drafter: Drafter, name: str) -> None:
        """The row that joins next is drafted for by `name`, or follows its prediction."""
        if isinstance(drafter, DrafterMux):
            drafter.next_owner = name if name in self._parts else self.names[0]

    def rules_of(self, request: Request) -> tuple[str, RowVerifier | None]:
        """The drafter of a request, and its verifier where that is not the decoder's. Raises
        ConfigError or CapabilityError."""
        asked = request.speculation
        name = self._drafter_of(request)
        if asked.lossy is not None:
            return name, self._allowed_lossy(asked.lossy)
        wanted = request.is_invariant or (asked.invariant is None and name in self._by_noise)
        return name, invariant_verifier(request.params, self._main.verifier, wanted=wanted)

    def is_reproducible(self, request: Request, verifier: RowVerifier) -> bool:
        """Whether its text follows from prompt, parameters and seed. What a row says that is
        sampled and not drafter-invariant depends on its drafts, and these on the hour: how many
        there are (the control), whether one call drafts them all (not alongside a row with filters or
        a grammar), when the draft model has read the prompt, and from what pages."""
        limits = self._models.target.lm.limits
        exact = limits.exact_rows and (limits.exact_trees or not self._draws_trees)
        return exact and verifier.lossless and (request.params.is_greedy or verifier.coupled)

    def instruct(self, row: Row, request: Request, context: int) -> None:
        """Tell the row how it is drafted for. Raises ConfigError for more draft tokens than its
        drafter was built for, RequestError for a prediction that cannot come true.
        """
        row.drafter = self._drafter_of(request)
        row.draft_bound, row.draft_fixed = self._bound_of(request)
        if request.is_predicted and request.prediction is not None:
            row.prediction = checked_prediction(
                request.prediction, self._models.target.lm.shape.vocab_size, context
            )

    def _each(self, control: Control) -> Control:
        """The control of a batch; where the length is free, one for each drafter."""
        if not isinstance(control, AutoLength):
            return control
        parts = {**self._parts, FOLLOWER: self._follower}
        return AutoLength({name: part.make_goodput() for name, part in parts.items()})

    def _bound_of(self, request: Request) -> tuple[int | None, bool]:
        """(`Row.draft_bound`, `Row.draft_fixed`)."""
        asked = request.speculation
        if asked.mode == "off":
            return 0, True
        max_nodes = (
            self._follower if request.is_predicted else self._parts[asked.drafter or self.names[0]]
        ).length.max_nodes
        bound = asked.max_draft_tokens
        if bound is not None and bound > max_nodes:
            raise ConfigError(
                f"speculation.max_draft_tokens must be at most {max_nodes} on this server, got "
                f"{bound}"
            )
        usual = self._main.length
        # a number that is not about copies, nor about load
        if request.is_predicted and not (usual.is_auto or usual.by_rows):
            return bound or min(max_nodes, max(usual.max_nodes, SMALL_TREE)), True
        return bound or max_nodes, asked.mode == "fixed"

    def _drafter_of(self, request: Request) -> str:
        asked = request.speculation.drafter
        if request.is_predicted:
            if asked not in (None, FOLLOWER):
                raise ConfigError(
                    f"speculation.drafter '{asked}' together with a prediction, which only '{FOLLOWER}' "
                    "follows: leave one of them out"
                )
            return FOLLOWER
        name = asked or self.names[0]
        if name not in self._parts:
            raise ConfigError(
                f"speculation.drafter '{name}' is not loaded here.{did_you_mean(name, self.names)}"
            )
        return name

    def _allowed_lossy(self, name: str) -> Verifier:
        if name in self._lossy:
            return self._lossy[name]
        allowed = (
            f" Allowed: {', '.join(self._lossy)}."
            if self._lossy
            else " It allows none: see --allow-lossy NAME."
        )
        raise CapabilityError(f"speculation.lossy '{name}' is not allowed by this server.{allowed}")


def _made(name: str) -> Verifier:
    verifier: type[Verifier] = VERIFIERS.load(name)
    return verifier.build(_settings(name))


def _settings(name: str) -> object:
    return parse_settings(VERIFIERS.load(name).Settings, {}, f"verifier '{name}'")


def lossy_verifier(name: str) -> Verifier:
    """A lossy verifier that requests may ask for by name. Raises ConfigError for one that is
    unknown, or needs nobody's leave."""
    verifier = _made(name)
    if verifier.lossless:
        others = [other for other, kind in VERIFIERS.importable().items() if not kind.lossless]
        raise ConfigError(
            f"verifier '{name}' is lossless, so nobody need allow it; lossy are: "
            f"{', '.join(others)}"
        )
    return verifier
