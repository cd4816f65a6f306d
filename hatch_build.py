"""Before a wheel is built or a checkout installed: the demo's packed weights are unpacked and the
native runtime is compiled.

An installation may be read-only, and its machine may have no compiler. Without one here, the wheel
has no native runtime. Where OUTRIDER_WHEEL_LIBRARIES names a folder, its libraries go into the wheel,
and its name is the wheel's platform: tools/wheels.py builds for other systems.
"""

import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKED_FOLDERS = ("outrider/demo/models/target", "outrider/demo/models/heads/block")
LIBRARIES = "outrider/runtime/lib"


class UnpackDemo(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling, for `pip install -e` too; `outrider.demo` needs nothing but the
        standard library."""
        sys.path.insert(0, self.root)
        from outrider.demo.packed import WEIGHTS, with_weights

        for name in PACKED_FOLDERS:
            ours = Path(self.root) / name
            if (folder := with_weights(ours)) != ours:  # the sources cannot be written
                build_data["force_include"][str(folder / WEIGHTS)] = f"{name}/{WEIGHTS}"
        if folder := os.environ.get("OUTRIDER_WHEEL_LIBRARIES"):
            for library in sorted(Path(folder).iterdir()):
                build_data["force_include"][str(library)] = f"{LIBRARIES}/{library.name}"
            self._for_platform(Path(folder).name, build_data)
        elif (Path(self.root) / "outrider/runtime/building.py").exists():
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
            self._say(f"without the native runtime: {error}")
            return
        build_data["artifacts"].append(f"/{LIBRARIES}/runtime-*")  # ignored by git
        self._for_platform(sysconfig.get_platform().replace("-", "_").replace(".", "_"), build_data)

    def _for_platform(self, platform: str, build_data: dict[str, Any]) -> None:
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def _say(self, line: str) -> None:
        """To the terminal itself: pip and uv show nothing of what a build prints."""
        self.app.display_info(line)
        if sys.stderr.isatty():
            return
        with suppress(OSError), open("/dev/tty", "w") as terminal:  # none: a script, or Windows
            terminal.write(f"\n  {line}\n")
