"""hatchling, with a metadata step that builds nothing.

pip asks for the metadata first. hatchling leaves that step out under pip, for projects whose build
changes their dependencies; pip then builds the whole wheel for it, and shows "Preparing metadata"
while the native runtime is compiled. Ours changes none.
"""

import os

os.environ.pop("PIP_BUILD_TRACKER", None)  # hatchling looks whether it is there

from hatchling.build import *  # noqa: F403
