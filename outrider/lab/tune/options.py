"""A configuration as keyword arguments of `outrider.LLM`: what a settings file holds."""

from __future__ import annotations

from typing import Any

from outrider.lab.configuration import Configuration


def options_of(configuration: Configuration, draft: str | None) -> dict[str, Any]:
    """Keyword arguments of `outrider.LLM`."""
    options = {name: value for name, value in configuration.as_dict().items() if value not in (None, {})}
    if configuration.parts().requirements.draft and draft is not None:
        options["draft"] = draft
    return options
