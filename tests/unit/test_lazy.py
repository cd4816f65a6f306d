"""Names under `deferred()`: nothing is imported until one of them is used."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from outrider.lazy import deferred
with deferred():
    from outrider import prompts
    from outrider.lab.journal import Journal
    from outrider.lab.progress import Lines
import json.tool  # outside: at once
print('outrider.lab.journal' in sys.modules, 'outrider.prompts' in sys.modules, 'json.tool' in sys.modules)
print(type(Lines(print)).__name__, Journal.open.__name__, prompts.__name__)
"""


def test_a_deferred_name_is_imported_when_it_is_used() -> None:
    """Called, asked for an attribute, or a module: the real one answers."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False False True", "Lines open outrider.prompts"]
