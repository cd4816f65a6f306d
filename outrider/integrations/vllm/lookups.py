"""Turns a drafter's name into a drafter that can work in vLLM, or into the reason why it cannot.

vLLM shows a drafter token ids and nothing else, and verifies one chain a row. So what is left are
the drafters that look texts up (`ngram`, `suffix`, `ngram-cache`, `retrieval`, a `composite` of
them), and those of others that need no more, like a client of a draft service. Options that make
trees by default make chains here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.composite import CompositeDrafter
from outrider.drafters.composite_settings import CompositeSettings
from outrider.errors import CapabilityError, ConfigError
from outrider.integrations.vllm.options import VARIABLES, Chosen
from outrider.integrations.vllm.target import TextOnly
from outrider.settings import parse_settings

CHAINS: dict[str, dict[str, Any]] = {"retrieval": {"branches": 1}, "ngram-cache": {"branches": 1}}
COMPOSITE = {"parts": "suffix,ngram", "mode": "best"}
REFUSED = {  # requirement -> what it asks for
    "module": "the target's own weights",
    "head": "a trained head, which reads the target's hidden states",
    "draft": "a draft model",
    "logits": "the target's logits",
    "prediction": "a prediction of the answer with each request",
}
Part = tuple[str, type[Drafter], Any]  # name, class, settings


@dataclass(frozen=True)
class LookupPlan:
    """A drafter that can work here, with its settings; `choose` checks both."""

    name: str
    kind: type[Drafter]
    settings: Any
    parts: tuple[Part, ...]  # of a composite; of others themselves

    @classmethod
    def choose(cls, chosen: Chosen) -> LookupPlan:
        """The drafter that vLLM's settings name.

        Raises ConfigError for unknown names and options, CapabilityError for a drafter that needs
        more than token ids.
        """
        name = chosen.drafter
        if name == "none":
            raise ConfigError(
                "drafter 'none' drafts nothing: leave --speculative-config out instead"
            )
        kind: type[Drafter] = DRAFTERS.load(name)
        settings = _settings(name, kind, chosen.options)
        parts = tuple(_parts(name, kind, settings))
        for part in parts:
            _check(*part)
        return cls(name, kind, settings, parts)

    @property
    def repeatable(self) -> bool:
        """Whether several ranks may each have their own."""
        return all(kind.repeatable for _, kind, _ in self.parts)

    def build(self, target: TextOnly, num_draft_tokens: int) -> Drafter:
        """The drafter, for at most `num_draft_tokens` a row. Raises what drafters raise, and
        CapabilityError for one that turns out to want hidden states."""
        loaded = target.load(tokenizer=any(kind.requires.tokenizer for _, kind, _ in self.parts))
        drafter = self.kind.build(DraftSetup(loaded, None, num_draft_tokens, self.settings))
        drafter.name = self.name
        if drafter.signals:
            raise CapabilityError(_refusal(self.name, "the target's hidden states"))
        return drafter


def _settings(name: str, kind: type[Drafter], options: dict[str, Any]) -> Any:
    usual = COMPOSITE if issubclass(kind, CompositeDrafter) else CHAINS.get(name, {})
    settings = parse_settings(kind.Settings, {**usual, **options}, f"drafter '{name}'")
    if isinstance(settings, CompositeSettings):
        return _with_chains(settings)
    return settings


def _with_chains(settings: CompositeSettings) -> CompositeSettings:
    """Set parts that make trees by default to chains, unless their options ask for trees."""
    given = settings.options_by_part()
    more = [
        f"{part}.{option}={value}"
        for part in settings.names()
        for option, value in CHAINS.get(part, {}).items()
        if option not in given.get(part, {})
    ]
    return replace(settings, options=";".join([*more, *filter(None, [settings.options])]))


def _parts(name: str, kind: type[Drafter], settings: Any) -> Iterator[Part]:
    """The drafter itself, or the parts of a composite. Raises ConfigError for a composite that
    shares a tree."""
    if not isinstance(settings, CompositeSettings):
        yield name, kind, settings
        return
    if settings.mode != "best":
        raise ConfigError(
            f"composite mode={settings.mode} makes trees, and vLLM verifies chains: use mode=best"
        )
    for part, (part_kind, part_settings) in CompositeDrafter.part_classes(settings).items():
        yield part, part_kind, part_settings


def _check(name: str, kind: type[Drafter], settings: Any) -> None:
    required = kind.requirements(settings)
    for requirement, what in REFUSED.items():
        if getattr(required, requirement):
            raise CapabilityError(_refusal(name, what))
    if required.trees:
        raise CapabilityError(
            f"drafter '{name}' drafts trees with these options, and vLLM verifies chains: take "
            "chains"
        )
    if getattr(settings, "cache", ""):
        raise CapabilityError(
            f"drafter '{name}' writes cache=FILE at a program's end, which vLLM does not "
            "announce: drop it"
        )


def usable() -> list[str]:
    """Names of the drafters that need nothing but token ids."""
    kinds: dict[str, type[Drafter]] = DRAFTERS.importable()
    return [
        name
        for name, kind in kinds.items()
        if name != "none" and (issubclass(kind, CompositeDrafter) or _needs_nothing(kind))
    ]


def _needs_nothing(kind: type[Drafter]) -> bool:
    return not any(getattr(kind.requires, requirement) for requirement in REFUSED)


def _refusal(name: str, what: str) -> str:
    return (
        f"drafter '{name}' needs {what}, and vLLM gives a custom drafter token ids only. Here it can be one of "
        f"{', '.join(usable())}; a draft model can draft in a draft service ({VARIABLES['draft_endpoint']}=HOST:PORT)."
    )
