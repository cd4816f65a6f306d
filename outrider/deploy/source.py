"""Reads what `tune` wrote: its result (`--out`) or its settings file (`--settings-out`), distinguished by content."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.lab.configuration import Configuration
from outrider.lab.result import read_result
from outrider.lab.tune.engine_advice import EngineAdvice, tuned
from outrider.lab.tune.stated import stated
from outrider.lab.tune.tune_result import TuneResult
from outrider.settings_file import REMEDY, SettingsFile, read_settings
from outrider.wellformed import read_json

NEITHER = "is neither a settings file (outrider tune --settings-out) nor a result of tune (--out)"


@dataclass(frozen=True)
class DraftSource:
    """How to draft, as a settings file, and where there is one the result that it came from."""

    settings: SettingsFile
    result: TuneResult | None = None

    def advice(self, temperature: float | None) -> EngineAdvice:
        """The options for other engines. `temperature` is for settings files, which do not contain it. Raises ConfigError."""
        if self.result is None:
            return stated(self.settings, temperature or 0.0)
        if temperature is not None:
            raise ConfigError(f"--temperature means nothing here: tune sampled at {self.result.tried.temperature:g} and says so")
        return tuned(self.result)

    def named(self, target: str | None, draft: str | None) -> DraftSource:
        """Other names of target and draft model, where given. Raises ConfigError where nothing drafts with a draft model."""
        settings = self.settings if target is None else replace(self.settings, target=target)
        if not settings.target:
            raise ConfigError("the settings do not say for which target they are: name it with --target")
        if draft is None:
            return replace(self, settings=settings)
        if self.result is None and not any(map(_names_draft, (settings.options, *settings.next_best))):
            raise ConfigError(f"--draft means nothing here: the settings draft with '{settings.options.get('drafter')}' alone")
        options, *next_best = (
            {**one, "draft": draft} if _names_draft(one) else one for one in (settings.options, *settings.next_best)
        )
        return replace(self, settings=replace(settings, options=options, next_best=next_best))


def _names_draft(options: dict[str, Any]) -> bool:
    """Whether a draft model drafts with these options."""
    return "draft" in options or options.get("drafter") == "draft-model"


def read_source(path: Path) -> DraftSource:
    """Read a file that `tune` wrote. Raises ConfigError in one line that names the mistake in the file."""
    content = read_json(path, f"settings file {path}", REMEDY)
    if isinstance(content, dict) and "kind" in content:
        result = read_result(path)
        if not isinstance(result, TuneResult):
            raise ConfigError(f"{path} is a result of '{result.kind}'; 'deploy' takes what 'tune' found")
        if result.interrupted:
            raise ConfigError(f"{path} is of an interrupted run: what it says rests on too little; go on with tune --resume")
        source = DraftSource(result.settings_file(), result)
    elif isinstance(content, dict) and "outrider_settings" in content:
        source = DraftSource(read_settings(path))
    else:
        raise ConfigError(f"{path} {NEITHER}")
    _check(source.settings, path)
    return source


def _check(settings: SettingsFile, path: Path) -> None:
    """Raises ConfigError for a drafter, verifier or option that `serve --settings` would refuse."""
    for options in (*settings.choices, *settings.next_best):
        known = {name: value for name, value in options.items() if name not in ("draft", "drafter")}
        name = options.get("drafter", "auto")
        if not isinstance(name, str) or not isinstance(options.get("draft", ""), str | None):
            raise ConfigError(f"{path}: 'drafter' and 'draft' are names, got {name!r} and {options.get('draft')!r}")
        try:
            if name != "auto":
                Configuration(name, **known).parts()
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: options are not what 'outrider tune' writes: {error}") from error
