"""Advice from a settings file: one way to draft, and nothing measured beside it."""

from __future__ import annotations

from collections.abc import Collection

from outrider.build import DEMO, Options, head_in, named_drafter
from outrider.errors import ConfigError
from outrider.lab.configuration import PLAIN, Configuration
from outrider.lab.tune.drafts import read_drafts
from outrider.lab.tune.export.choice import TRAINED, Engine, EngineAdvice, EngineChoice, can_draft
from outrider.lab.tune.head import TrainedHead
from outrider.settings_file import SettingsFile


class Stated(EngineAdvice):
    """The `options` of a settings file; `temperature` is what requests sample at, which such files do not say."""

    def __init__(self, settings: SettingsFile, temperature: float = 0.0) -> None:
        """Raises ConfigError for options that name nothing we have."""
        options = Options(settings.target, **settings.options)
        options = named_drafter(options, head_in(options.draft))
        self._configuration = Configuration(
            options.drafter, options.num_draft_tokens, options.drafter_options, options.verifier, options.verifier_options
        )
        self._length = self._configuration.parts().length
        draft = options.draft or (DEMO if settings.target == DEMO else None)
        super().__init__(
            settings.target, draft, sampled=temperature > 0, speculate=not self._configuration.is_plain,
            reason=settings.why or f"the settings say drafter '{PLAIN}'",
        )  # fmt: skip

    def choose(self, engine: Engine) -> EngineChoice | None:
        """The stated configuration; None where the engine lacks it. Raises ConfigError for a block head that cannot be read
        here."""
        one = self._configuration
        if not can_draft(one, engine):
            return None
        if one.drafter == "draft-model" and self.draft is None:
            raise ConfigError("the settings say 'draft-model' and name no draft model: give one with --draft")
        schedule = [pair for pair in self._length.by_rows if pair[0] == 1 or pair[1] < self._length.max_nodes]
        return EngineChoice(
            one.drafter, self._length.max_nodes, one.drafter_options, schedule or [(1, self._length.max_nodes)], self._notes(),
            self._head(),
        )  # fmt: skip

    def nothing(self, drafters: Collection[str]) -> str:
        """Why the engine cannot do what the settings say, and what would help."""
        kind = self._configuration.drafter
        lacking = f"has no {TRAINED.get(kind, repr(kind))}" if kind not in drafters else "cannot draft that way"
        return (
            f"the settings say '{self._configuration.label}', and it {lacking}; it has {', '.join(sorted(drafters))}. "
            "The result of 'outrider tune --out FILE' knows the second best; 'compose' and 'k8s' run outrider itself"
        )

    def _notes(self) -> list[str]:
        notes = []
        if self._length.is_auto:
            notes.append(f"The settings leave the draft length open; it wants a number: {self._length.max_nodes}, their maximum.")
        if stop := self._configuration.drafter_options.get("stop"):
            notes.append(f"Without the stop rule '{stop}', which it does not have.")
        return notes

    def _head(self) -> TrainedHead | None:
        """What is known of the trained head that drafts; of a block head more than its kind is needed."""
        kind, folder = self._configuration.drafter, str(self._configuration.drafter_options.get("head", ""))
        if kind not in TRAINED:
            return None
        if kind != "block":
            return TrainedHead(kind=kind, folder=folder)
        found = read_drafts(Options(self.target), [folder] if folder else []).heads
        named = next((one for one in found if one.kind == kind and one.folder == folder), None)
        if named is None:
            raise ConfigError(f"the block head '{folder}' cannot be read here, so nobody knows how long its blocks are")
        return named
