"""Reads what `tune` wrote: its result (`--out`) or its settings file (`--settings-out`), distinguished by content."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from outrider.errors import ConfigError
from outrider.lab.configuration import Configuration
from outrider.lab.result import read_result
from outrider.lab.tune.export.choice import EngineAdvice, tuned
from outrider.lab.tune.export.stated import stated
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
        drafter = settings.options.get("drafter")
        if draft is not None and self.result is None and "draft" not in settings.options and drafter != "draft-model":
            raise ConfigError(f"--draft means nothing here: the settings draft with '{drafter}' alone")
        if draft is not None and ("draft" in settings.options or drafter == "draft-model"):
            settings = replace(settings, options={**settings.options, "draft": draft})
        return replace(self, settings=settings)


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
    for options in (settings.options, *settings.for_tasks.values(), *settings.for_batch_sizes.values()):
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
