"""SGLang: a script with the launch command."""

from __future__ import annotations

from outrider.deploy.deployment import Deployment
from outrider.deploy.files import DeployFiles, script
from outrider.deploy.vllm import PLAIN
from outrider.errors import CapabilityError
from outrider.lab.tune.export import sglang
from outrider.lab.tune.export.choice import EXPORTED


def files(deployment: Deployment) -> DeployFiles:
    """`sglang.sh`. Raises CapabilityError where SGLang cannot do what the settings state."""
    flags, variables, notes = sglang.speculation(deployment.advice)
    if not flags and deployment.source.result is None and deployment.advice.speculate:
        raise CapabilityError(f"SGLang: {notes[0]}")
    if deployment.head is not None and any(EXPORTED in line for line in flags):
        flags = [[deployment.head if word == EXPORTED else word for word in line] for line in flags]
        notes = [note for note in notes if not note.startswith("First: ")]
    serving = ["--host", deployment.host, "--port", str(deployment.port), "--served-model-name", deployment.served_name]
    lines = [deployment.headline, *([] if flags else [PLAIN.format("SGLang")]), *notes]
    return DeployFiles({"sglang.sh": script(lines, [sglang.command(deployment.advice.target, variables), serving, *flags])})
