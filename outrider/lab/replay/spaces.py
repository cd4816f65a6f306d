"""Which options of a model-free drafter a search may try, and between which bounds.

What changes memory, files or other requests is not searched (`max_tokens`, `cache`, `max_entries`, `corpus`, ...). Options that
the user has set are kept as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from outrider.drafters.composite import CompositeDrafter
from outrider.drafters.lookup.suffix_array import DEPTH
from outrider.errors import ConfigError, did_you_mean
from outrider.lab.configuration import Configuration
from outrider.parts import Parts

LENGTH = "k"  # the name of the draft length among the options
Space = Mapping[str, BaseDistribution]


def one_of(*values: Any) -> CategoricalDistribution:
    return CategoricalDistribution(values)


LENGTHS = IntDistribution(1, 24, log=True)
SPACES: dict[str, Space] = {
    "ngram": {
        "min_ngram": IntDistribution(1, 4), "max_ngram": IntDistribution(1, 8), "recency": FloatDistribution(0.0, 1.0),
        "min_share": FloatDistribution(0.0, 0.6), "tree": one_of(False, 2, 4, 8),
    },
    "suffix": {
        "max_depth": IntDistribution(8, 128, log=True), "alpha": FloatDistribution(0.0, 8.0),
        "beta": FloatDistribution(0.0, 8.0), "min_probability": FloatDistribution(0.0, 0.6),
        "discount": FloatDistribution(0.0, 1.0), "tree": one_of(False, True),
    },
    "ngram-cache": {
        "min_ngram": IntDistribution(1, 4), "max_ngram": IntDistribution(1, 8), "branches": IntDistribution(1, 4),
        "min_probability": FloatDistribution(0.0, 0.6), "learn_prompts": one_of(True, False),
    },
    "retrieval": {
        "max_match": IntDistribution(2, DEPTH), "min_match": IntDistribution(1, 8), "branches": IntDistribution(1, 8),
        "min_share": FloatDistribution(0.0, 0.6), "max_occurrences": IntDistribution(16, 1024, log=True),
    },
}  # fmt: skip


def in_words(space: Space) -> dict[str, str]:
    """Option -> range, for a person."""
    return {name: _in_words(one) for name, one in space.items()}


def _in_words(one: Any) -> str:
    return ", ".join(map(str, one.choices)) if isinstance(one, CategoricalDistribution) else f"{one.low:g} to {one.high:g}"


def space_of(configuration: Configuration, *, lengths: bool) -> dict[str, BaseDistribution]:
    """What may be tried around a configuration: options that it does not set. `lengths`: and the draft length.

    A composite's parts have theirs as PART.NAME. Raises ConfigError for a drafter without a known space.
    """
    parts = configuration.parts()
    if issubclass(parts.drafter, CompositeDrafter):
        whole: dict[str, BaseDistribution] = {"mode": one_of("merge", "best")}
        for part in parts.drafter.part_classes(parts.drafter_settings):
            whole |= {f"{part}.{name}": range_ for name, range_ in _known(part).items()}
    else:
        whole = dict(_known(configuration.drafter))
    if lengths:
        whole[LENGTH] = LENGTHS
    given = _given(configuration, parts)
    return {name: range_ for name, range_ in whole.items() if name not in given}


def values_of(configuration: Configuration, space: Space) -> dict[str, Any]:
    """What the configuration has now for everything in `space`. Raises ConfigError for names that are no options."""
    parts = configuration.parts()
    values: dict[str, Any] = {LENGTH: parts.length.max_nodes, **dataclasses.asdict(parts.drafter_settings)}
    if issubclass(parts.drafter, CompositeDrafter):
        for part, (_, settings) in parts.drafter.part_classes(parts.drafter_settings).items():
            values |= {f"{part}.{name}": value for name, value in dataclasses.asdict(settings).items()}
    for name in space:
        if name not in values:
            raise ConfigError(f"drafter '{configuration.drafter}' has no option '{name}' to search.{did_you_mean(name, values)}")
    return {name: values[name] for name in space}


def with_values(configuration: Configuration, values: Mapping[str, Any]) -> Configuration:
    """The configuration with these values in place of its own."""
    options = dict(configuration.drafter_options)
    of_parts = dict(item.split("=", 1) for item in options.get("options", "").split(";") if item)
    for name, value in values.items():
        if "." in name:
            of_parts[name] = str(value)
        elif name != LENGTH:
            options[name] = value
    if of_parts:
        options["options"] = ";".join(f"{name}={value}" for name, value in of_parts.items())
    return replace(
        configuration, drafter_options=options, num_draft_tokens=values.get(LENGTH, configuration.num_draft_tokens)
    )


def _known(drafter: str) -> Space:
    if drafter not in SPACES:
        raise ConfigError(
            f"it is not known between which bounds the options of drafter '{drafter}' make sense; give search() a space. "
            f"Known: {', '.join(SPACES)}, and composites of these"
        )
    return SPACES[drafter]


def _given(configuration: Configuration, parts: Parts) -> set[str]:
    """Names that the user has set."""
    given = {name.replace("-", "_") for name in configuration.drafter_options}
    if configuration.num_draft_tokens is not None:
        given.add(LENGTH)
    if issubclass(parts.drafter, CompositeDrafter):
        for part, options in parts.drafter_settings.options_by_part().items():
            given |= {f"{part}.{name}" for name in options}
    return given
