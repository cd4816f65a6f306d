"""Drafter, verifier and draft length: from names and options to parts that fit one another, before
any model is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.draft_length import AutoLength, FixedLength, Goodput
from outrider.draft_length.length import DraftLength
from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.requirements import Requirements
from outrider.errors import CapabilityError, ConfigError
from outrider.models.loaded import LoadedModel
from outrider.settings import parse_settings
from outrider.verifiers import VERIFIERS
from outrider.verifiers.base import Verifier


@dataclass(frozen=True)
class Parts:
    """The choice of `choose_parts`. `make_drafter` and `make_verifier` turn it into objects."""

    drafter_name: str  # as registered
    drafter: type[Drafter]
    drafter_settings: Any
    requirements: Requirements  # of the drafter, under its settings
    verifier: type[Verifier]
    verifier_settings: Any
    length: DraftLength
    is_verifier_named: bool = False  # not chosen for the drafter
    # steps may ask for any number up to `length.max_nodes`, whichever policy decides it
    any_length: bool = False
    notes: tuple[str, ...] = ()  # on how the drafter was found

    def make_drafter(self, target: LoadedModel, draft: LoadedModel | None) -> Drafter:
        """The drafter for this target."""
        settings = self.drafter_settings
        length = self.length
        self._check_states(target, draft)
        setup = DraftSetup(target, draft, length.max_nodes, settings, self.requirements.head_folder)
        drafter = self.drafter.build(setup)
        drafter.name = self.drafter_name
        return drafter

    def _check_states(self, target: LoadedModel, draft: LoadedModel | None) -> None:
        """Raises CapabilityError for a drafter that models with running states, or on transformers'
        own cache, cannot serve."""
        for model in (target, draft):
            if model is None or not (model.lm.shape.states or model.lm.why_own_cache):
                continue
            name = model.name
            reason = model.lm.why_own_cache
            why = None
            if self.requirements.trees and reason:
                why = f"drafts trees, and states cannot branch in transformers' own cache, on which '{name}' runs ({reason})"
            elif self.requirements.trees and model is draft:
                why = f"would draft a tree in several passes of '{name}', whose running states branch within one pass alone"
            elif self.requirements.module and model is target:
                why = f"drafts on the keys and values of '{name}', which some of its layers do not have in our cache"
            if why is not None:
                raise CapabilityError(
                    f"drafter '{self.drafter_name}' {why}. "
                    "Use a drafter of chains: ngram, suffix, draft-model, composite with "
                    "mode=best, ..."
                )

    @property
    def loop_lengths(self) -> tuple[int, ...]:
        """Tokens that the calls of a recorded drafting loop make (CUDA graphs); none: there is no
        loop."""
        return self.requirements.loop_lengths(self.length.max_nodes, any_length=self._varies)

    @property
    def _varies(self) -> bool:
        return self.any_length or self.length.varies

    def make_goodput(self) -> Goodput:
        """Chooses lengths for this drafter, where they are free."""
        return Goodput(self.length.max_nodes, trees=self.requirements.trees)

    def make_control(self) -> FixedLength | AutoLength:
        length = self.length
        if length.is_auto:
            return AutoLength({self.drafter_name: self.make_goodput()})
        return FixedLength(length.max_nodes, length.by_rows)

    def make_verifier(self) -> Verifier:
        return self.verifier.build(self.verifier_settings)


def choose_parts(
    drafter: str,
    drafter_options: dict[str, Any],
    verifier: str,
    verifier_options: dict[str, Any],
    num_draft_tokens: int | str | None,
    *,
    lossy: bool,
) -> Parts:
    """Drafter, verifier and draft length by their names.

    Raises ConfigError for unknown names, options or values, CapabilityError where two parts do not
    fit.
    """
    drafter_class: type[Drafter] = DRAFTERS.load(drafter)
    settings = parse_settings(drafter_class.Settings, drafter_options, f"drafter '{drafter}'")
    requirements = drafter_class.requirements(settings)
    is_verifier_named = verifier != "auto"
    if not is_verifier_named:
        verifier = "traversal" if requirements.trees else "block"
    verifier_class: type[Verifier] = VERIFIERS.load(verifier)
    if requirements.trees and verifier_class.shape != "tree":
        trees = [name for name, kind in VERIFIERS.importable().items() if kind.shape == "tree"]
        raise CapabilityError(
            f"verifier '{verifier}' takes chains, but drafter '{drafter}' drafts trees; use one "
            f"of {', '.join(trees)}"
        )
    _check_lossy(verifier, verifier_class, lossy)
    return Parts(
        drafter_name=drafter,
        drafter=drafter_class,
        drafter_settings=settings,
        requirements=requirements,
        verifier=verifier_class,
        verifier_settings=parse_settings(
            verifier_class.Settings, verifier_options, f"verifier '{verifier}'"
        ),
        length=DraftLength.parse(num_draft_tokens, requirements.num_draft_tokens),
        is_verifier_named=is_verifier_named,
    )


def _check_lossy(name: str, verifier: type[Verifier], lossy: bool) -> None:
    if not verifier.lossless and not lossy:
        raise ConfigError(
            f"verifier '{name}' is lossy: it changes the distribution. Allow it with --lossy "
            "(lossy=True in Python)."
        )
    if verifier.lossless and lossy:
        others = [other for other, kind in VERIFIERS.importable().items() if not kind.lossless]
        raise ConfigError(
            f"lossy was asked for, but verifier '{name}' is lossless; lossy are: "
            f"{', '.join(others)}"
        )
