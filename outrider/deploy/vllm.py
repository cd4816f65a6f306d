"""vLLM: a script with the launch command, and its `speculative_config` as a file of its own."""

from __future__ import annotations

import json
from typing import Any

from outrider.deploy.deployment import Deployment
from outrider.deploy.files import DeployFiles, script
from outrider.lab.tune.launch_lines import VLLM, vllm_arguments, vllm_command

PLAIN = "{}: plain decoding, no speculation."


def arguments(deployment: Deployment) -> tuple[dict[str, Any], list[str]]:
    """Engine arguments, none for plain decoding, and notes. Raises CapabilityError where vLLM cannot do what is stated."""
    choice, notes = deployment.ask(VLLM)
    return {} if choice is None else vllm_arguments(choice, deployment.advice), notes


def files(deployment: Deployment) -> DeployFiles:
    """`vllm.sh`, and `speculative_config.json` where it speculates."""
    found, notes = arguments(deployment)
    more = ["--host", deployment.host, "--port", str(deployment.port), "--served-model-name", deployment.served_name]
    command = vllm_command(deployment.advice.target, found, more)
    ends = len(command) - 2 * len(found)
    lines = [deployment.headline, *([] if found else [PLAIN.format("vLLM")]), *notes]
    written = DeployFiles({"vllm.sh": script(lines, [part for part in (command[:ends], command[ends:]) if part])})
    if found:
        written["speculative_config.json"] = json.dumps(found["speculative_config"], indent=1) + "\n"
    return written
