"""A model's config as an earlier start kept it: its values without transformers' class, whose import takes seconds.

What cannot be written down (methods, views of single layers) is asked of the real config, which is then read.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from typing import Any

import torch

from outrider.lazy import transformers


class KeptConfig:
    """Answers what transformers' config of the same model answers."""

    def __init__(self, kept: dict[str, Any], whole: Callable[[], Any]) -> None:
        """`kept`: what `written` gave; `whole` reads the real config."""
        self.__dict__ |= ast.literal_eval(kept["values"])
        self.__dict__ |= {name: getattr(torch, dtype) for name, dtype in kept["dtypes"].items()}
        self._outrider_dict, self._outrider_left = ast.literal_eval(kept["dict"]), frozenset(kept["left"])
        self._outrider_whole = whole

    def get_text_config(self, **unused: object) -> Any:
        """Itself: configs of several models are not kept."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The values that a config.json would have."""
        return copy.deepcopy(self._outrider_dict)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_outrider_left", ()):
            return getattr(self._outrider_whole(), name)
        raise AttributeError(f"the config has no '{name}'")


def written(config: Any) -> dict[str, Any] | None:
    """A config as text and names, for `KeptConfig`; None for one that is made of several."""
    as_dict = config.to_dict()
    if config.get_text_config() is not config or not _is_literal(as_dict):
        return None
    values: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    left: list[str] = []
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # some names are deprecated, which nobody here asked for
    try:
        for name in sorted({*dir(config), *vars(config), *config.attribute_map}):
            try:
                value = getattr(config, name)
            except AttributeError:
                continue
            except Exception:  # noqa: BLE001  of a property: the caller is to see it
                left.append(name)
                continue
            if isinstance(value, torch.dtype):
                dtypes[name] = str(value).removeprefix("torch.")
            elif not callable(value) and not name.startswith("__") and _is_literal(value):
                values[name] = value
            elif not name.startswith("__") and not hasattr(KeptConfig, name):
                left.append(name)
    finally:
        logging.set_verbosity(verbosity)
    return {"values": repr(values), "dtypes": dtypes, "left": left, "dict": repr(as_dict)}


def _is_literal(value: Any) -> bool:
    """Whether a value can be read back from how Python writes it."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False
