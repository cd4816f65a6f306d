"""Which drafter an operator wants in vLLM: from `--additional-config`, else from the environment.

    --additional-config '{"outrider": {"drafter": "suffix", "drafter_options": {"max_depth": 32}}}'
    OUTRIDER_DRAFTER=suffix OUTRIDER_DRAFTER_OPTIONS='max_depth=32'

vLLM carries `additional_config` to every worker on every node; a variable of the environment must
be set on each of them. What the configuration names wins over the environment, key by key.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError, did_you_mean

KEY = "outrider"  # in vLLM's `additional_config`
DRAFTER = "drafter"
OPTIONS = "drafter_options"
ENDPOINT = "draft_endpoint"
VARIABLES = {
    DRAFTER: "OUTRIDER_DRAFTER",
    OPTIONS: "OUTRIDER_DRAFTER_OPTIONS",
    ENDPOINT: "OUTRIDER_DRAFT_ENDPOINT",
}
DEFAULT_DRAFTER = "suffix"
REMOTE = "remote"  # the drafter that asks a draft service


@dataclass(frozen=True)
class Chosen:
    """A drafter's name and its options, as `--drafter` would give them."""

    drafter: str
    options: dict[str, Any]


def read_options(additional_config: Any, environment: Mapping[str, str]) -> Chosen:
    """The drafter asked for, by default 'suffix'. Raises ConfigError for unknown keys and for
    values that are no options."""
    given = _from_environment(environment) | _from_config(additional_config)
    options = _options(given.get(OPTIONS, {}))
    endpoint = given.get(ENDPOINT)
    drafter = given.get(DRAFTER, REMOTE if endpoint else DEFAULT_DRAFTER)
    if not isinstance(drafter, str) or not drafter:
        raise ConfigError(f"the drafter must be a name, got {drafter!r}")
    if endpoint:
        if drafter != REMOTE:
            raise ConfigError(
                f"{VARIABLES[ENDPOINT]} names a draft service, and the drafter is '{drafter}', "
                "which asks none: drop one of them"
            )
        options = {"endpoint": endpoint, **options}
    return Chosen(drafter, options)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    return {key: environment[name] for key, name in VARIABLES.items() if environment.get(name)}


def _from_config(additional_config: Any) -> dict[str, Any]:
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"additional_config['{KEY}'] must be an object with {', '.join(VARIABLES)}; got "
            f"{given!r}"
        )
    for name in given:
        if name not in VARIABLES:
            raise ConfigError(
                f"additional_config['{KEY}'] has no key '{name}'.{did_you_mean(name, VARIABLES)}"
            )
    return dict(given)


def _options(given: Any) -> dict[str, Any]:
    """An object, its JSON, or NAME=VALUE with spaces between."""
    if isinstance(given, Mapping):
        return dict(given)
    text = str(given).strip()
    if text.startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise ConfigError(
                f"the drafter's options are no JSON object: {error}; got {text}"
            ) from error
    try:
        pairs = [item.partition("=") for item in shlex.split(text)]
    except ValueError as error:
        raise ConfigError(f"the drafter's options cannot be read: {error}; got {text}") from error
    for name, equals, _ in pairs:
        if not (name and equals):
            raise ConfigError(
                "the drafter's options are NAME=VALUE with spaces between, or a JSON object; got "
                f"'{text}'"
            )
    return {name: value for name, _, value in pairs}
