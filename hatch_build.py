"""Before a wheel is built or a checkout installed: the demo target's weights are unpacked and the
native runtime is compiled.

An installation may be read-only, and its machine may have no compiler. Without one here, the wheel
has no native runtime.
"""

import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TARGET = "outrider/demo/models/target"


class UnpackDemo(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling, for `pip install -e` too; `outrider.demo` needs nothing but the
        standard library."""
        sys.path.insert(0, self.root)
        from outrider.demo.packed import WEIGHTS, with_weights

        ours = Path(self.root) / TARGET
        if (folder := with_weights(ours)) != ours:  # the sources cannot be written
            build_data["force_include"][str(folder / WEIGHTS)] = f"{TARGET}/{WEIGHTS}"
        if (ours / "../../../runtime/building.py").resolve().exists():
            self._compile(build_data)

    def _compile(self, build_data: dict[str, Any]) -> None:
        """Shared libraries for every set of instructions, and a wheel that says for which system it
        is."""
        from outrider.errors import CapabilityError
        from outrider.instructions import of_this_architecture
        from outrider.runtime.building import build_all

        if not of_this_architecture():
            return
        try:
            build_all(status=self._say)
        except (CapabilityError, OSError) as error:
            self.app.display_warning(f"without the native runtime: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        )

    def _say(self, line: str) -> None:
        """To the terminal itself: pip and uv show nothing of what a build prints."""
        self.app.display_info(line)
        if sys.stderr.isatty():
            return
        with suppress(OSError), open("/dev/tty", "w") as terminal:  # none: a script, or Windows
            terminal.write(f"\n  {line}\n")
