"""vLLM: a script with the launch command, and its `speculative_config` as a file of its own."""

from __future__ import annotations

import json
from typing import Any

from outrider.deploy.deployment import Deployment
from outrider.deploy.files import Files, script
from outrider.errors import CapabilityError
from outrider.lab.tune.export import vllm
from outrider.lab.tune.export.choice import EXPORTED

PLAIN = "{}: plain decoding, no speculation."


def speculative_config(deployment: Deployment) -> tuple[dict[str, Any] | None, list[str]]:
    """The configuration, None for plain decoding, and its notes. Raises CapabilityError where vLLM cannot do what is stated."""
    found, notes = vllm.speculation(deployment.advice)
    if found is None and deployment.source.result is None and deployment.advice.speculate:
        raise CapabilityError(f"vLLM: {notes[0]}")
    if found is not None and found.get("model") == EXPORTED and deployment.head is not None:
        found["model"] = deployment.head
        notes = [note for note in notes if not note.startswith("First: ")]
    return found, notes


def files(deployment: Deployment) -> Files:
    """`vllm.sh`, and `speculative_config.json` where it speculates."""
    found, notes = speculative_config(deployment)
    more = [
        "--host", deployment.host, "--port", str(deployment.port), "--served-model-name", deployment.served_name,
    ]  # fmt: skip
    command = vllm.command(deployment.advice.target, found, more)
    ends = command.index("--speculative-config") if found is not None else len(command)
    lines = [deployment.headline, *([PLAIN.format("vLLM")] if found is None else []), *notes]
    written = Files({"vllm.sh": script(lines, [part for part in (command[:ends], command[ends:]) if part])})
    if found is not None:
        written["speculative_config.json"] = json.dumps(found, indent=1) + "\n"
    return written
