"""A file of settings that `generate`, `chat` and `serve` load with --settings, and that `outrider
tune` writes.

    {"outrider_settings": 1, "target": "demo", "options": {"drafter": "draft-model",
    "num_draft_tokens": 5}, "why": "..."}

`options` are keyword arguments of `outrider.LLM` that say how to draft and verify; no others, so
that a file can be shared between machines. `for_tasks` and `for_batch_sizes` may hold other choices
for parts of the traffic.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, did_you_mean
from outrider.wellformed import read_json

FORMAT = 1
REMEDY = ". 'outrider tune --settings-out FILE' writes one"  # to append to a message
OPTIONS = (
    "drafter",
    "draft",
    "num_draft_tokens",
    "drafter_options",
    "verifier",
    "verifier_options",
)


@dataclass(frozen=True)
class SettingsFile:
    """How to draft for one target."""

    target: str  # as the user named it
    options: dict[str, Any]
    # task -> options that are better for it
    for_tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    # rows, from which on -> options
    for_batch_sizes: dict[int, dict[str, Any]] = field(default_factory=dict)
    why: str = ""

    @property
    def choices(self) -> list[dict[str, Any]]:
        """All options that Outrider itself may be started with."""
        return [self.options, *self.for_tasks.values(), *self.for_batch_sizes.values()]

    def text(self) -> str:
        """The file's content."""
        content = {
            "outrider_settings": FORMAT,
            "target": self.target,
            "options": self.options,
            "for_tasks": self.for_tasks,
            "for_batch_sizes": {
                str(size): options for size, options in self.for_batch_sizes.items()
            },
            "why": self.why,
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def write(self, path: Path) -> None:
        """Raises ConfigError where the file cannot be written."""
        try:
            path.write_text(self.text(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"settings cannot be written to {path}: {error.strerror}") from error


def read_settings(path: Path) -> SettingsFile:
    """The settings in a file. Raises ConfigError that says what is wrong with the file."""
    content = read_json(path, f"settings file {path}", REMEDY)
    if isinstance(content, dict) and "schema_version" in content:
        raise ConfigError(
            f"{path} is a result: --settings takes the file that 'outrider tune' writes to "
            "--settings-out"
        )
    if not isinstance(content, dict) or content.get("outrider_settings") != FORMAT:
        raise ConfigError(
            f'{path} is no settings file of this version: it must have "outrider_settings": '
            f"{FORMAT}{REMEDY}"
        )
    options: Any = content.get("options")
    by_task = content.get("for_tasks") or {}
    by_size = content.get("for_batch_sizes") or {}
    try:
        for setting in (options, *by_task.values(), *by_size.values()):
            _check_options(setting, path)
        sizes = {int(size): setting for size, setting in by_size.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: 'for_tasks' and 'for_batch_sizes' map names and row counts to options"
        ) from error
    return SettingsFile(
        str(content.get("target", "")), options, by_task, sizes, str(content.get("why", ""))
    )


def _check_options(options: Any, path: Path) -> None:
    if not isinstance(options, dict):
        raise ConfigError(
            f"{path}: 'options' must be an object of options, got {type(options).__name__}"
        )
    for name in options:
        if name not in OPTIONS:
            raise ConfigError(f"{path}: unknown option '{name}'.{did_you_mean(name, OPTIONS)}")
