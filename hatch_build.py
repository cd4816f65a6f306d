"""Before a wheel is built or a checkout installed, the demo target's weights are unpacked: an installation may be read-only."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TARGET = "outrider/demo/models/target"


class UnpackDemo(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling, for `pip install -e` too; `outrider.demo` needs nothing but the standard library."""
        sys.path.insert(0, self.root)
        from outrider.demo.packed import WEIGHTS, with_weights

        ours = Path(self.root) / TARGET
        if (folder := with_weights(ours)) != ours:  # the sources cannot be written
            build_data["force_include"][str(folder / WEIGHTS)] = f"{TARGET}/{WEIGHTS}"
