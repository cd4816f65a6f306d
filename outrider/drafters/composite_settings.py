"""The settings of `--drafter composite`: which drafters, and how they share a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.errors import ConfigError
from outrider.settings import checked, setting

SOURCES = (
    "ngram, suffix, prediction, ngram-cache, recycling, lookahead, retrieval; one of draft-model, quantised, early-exit, "
    "universal, eagle, eagle3, medusa, block, mtp"
)


@checked()
@dataclass(frozen=True)
class CompositeSettings:
    """Which drafters, and how they share a step."""

    parts: str = setting("draft-model,suffix", f"drafters, with commas: {SOURCES}")
    mode: Literal["merge", "best"] = setting(
        "merge", "one tree of all, or the best part of each row"
    )
    options: str = setting("", "settings of parts, like suffix.max_depth=32;eagle3.head=FOLDER")

    def __post_init__(self) -> None:
        names = self.names()
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            raise ConfigError(
                "a composite needs at least two different drafters, like suffix,ngram; got "
                f"'{self.parts}'"
            )
        if "composite" in names or "none" in names:
            raise ConfigError("a composite cannot contain 'composite' or 'none'")
        for name in self.options_by_part():
            if name not in names:
                raise ConfigError(
                    f"options name '{name}', which is not among the parts {self.parts}"
                )

    def names(self) -> list[str]:
        return [name.strip() for name in self.parts.split(",")]

    def options_by_part(self) -> dict[str, dict[str, str]]:
        """'a.x=1;b.y=2' -> {'a': {'x': '1'}, 'b': {'y': '2'}}. Raises ConfigError."""
        options: dict[str, dict[str, str]] = {}
        for item in filter(None, (part.strip() for part in self.options.split(";"))):
            path, equals, value = item.partition("=")
            name, dot, option = path.partition(".")
            if not (equals and dot):
                raise ConfigError(
                    f"options are PART.NAME=VALUE with semicolons between, got '{item}'"
                )
            options.setdefault(name, {})[option] = value
        return options
