"""Switches in the environment, of a few words each."""

from __future__ import annotations

import os
from collections.abc import Sequence

from outrider.errors import ConfigError, did_you_mean


def switched(variable: str, choices: Sequence[str]) -> str:
    """The word that a variable of the environment has; the first of `choices` where it has none.
    Raises ConfigError where it has another."""
    chosen = os.environ.get(variable) or choices[0]
    if chosen not in choices:
        raise ConfigError(
            f"{variable} says '{chosen}', which is none of its choices."
            f"{did_you_mean(chosen, choices)}"
        )
    return chosen
