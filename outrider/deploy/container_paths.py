"""Files of this machine that a container needs: each gets a path there, and the settings name that path.

A model folder, a trained head, a corpus become /models/NAME, read only; what a drafter keeps between runs becomes /cache/NAME.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.options import DEMO
from outrider.settings_file import SettingsFile

MODELS, CACHE = "/models", "/cache"
FILES = ("head", "acceptance_head", "corpus", "index", "ca", "cert", "key")  # options of drafters that name files to read
KEPT = ("cache",)  # options of drafters that name a file to write


@dataclass
class ContainerPaths:
    """Paths here, and where they are in the container."""

    known: dict[str, str] = field(default_factory=dict)  # absolute path here -> path there

    def of(self, name: str) -> str:
        """The path of a file or folder that is read."""
        path = str(Path(name).expanduser().absolute())
        if path not in self.known:
            self.known[path] = self._free(Path(path).name)
        return self.known[path]

    def of_model(self, name: str) -> str:
        """The path of a model folder; hub ids and 'demo' stay what they are."""
        return self.of(name) if is_local(name) else name

    def in_container(self, settings: SettingsFile) -> SettingsFile:
        """The settings as the container reads them."""
        return replace(
            settings, target=self.of_model(settings.target), options=self._options(settings.options),
            for_tasks={task: self._options(options) for task, options in settings.for_tasks.items()},
            for_batch_sizes={size: self._options(options) for size, options in settings.for_batch_sizes.items()},
            next_best=[],  # for engines other than the container's
        )  # fmt: skip

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        changed = dict(options)
        if changed.get("draft"):
            changed["draft"] = self.of_model(changed["draft"])
        if "drafter_options" in changed:
            own = {name: self._value(name, value) for name, value in changed["drafter_options"].items()}
            changed["drafter_options"] = own
        return changed

    def _value(self, name: str, value: Any) -> Any:
        if name == "options" and isinstance(value, str):  # of parts: suffix.max_depth=32;eagle3.head=FOLDER
            pairs = [part.partition("=") for part in value.split(";")]
            return ";".join(f"{key}{equals}{self._value(key.rpartition('.')[2], one)}" for key, equals, one in pairs)
        if value and name == "draft":
            return self.of_model(str(value))
        if value and name in KEPT:
            return f"{CACHE}/{Path(str(value)).name}"
        return self.of(str(value)) if value and name in FILES else value

    def _free(self, name: str) -> str:
        taken, tries = set(self.known.values()), 1
        path = f"{MODELS}/{name}"
        while path in taken:
            tries += 1
            path = f"{MODELS}/{name}-{tries}"
        return path


def is_local(name: str) -> bool:
    """Whether a model's name is a path of this machine; a hub id is ORG/NAME or NAME."""
    return name != DEMO and (name.startswith(("/", "./", "../", "~")) or Path(name).exists())
