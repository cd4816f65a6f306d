"""SGLang: a script with the launch command."""

from __future__ import annotations

from outrider.deploy.deployment import Deployment
from outrider.deploy.files import DeployFiles, script
from outrider.deploy.vllm import PLAIN
from outrider.lab.tune.export import sglang


def files(deployment: Deployment) -> DeployFiles:
    """`sglang.sh`. Raises CapabilityError where SGLang cannot do what the settings state."""
    choice, notes = deployment.ask(sglang.SGLANG)
    flags = [] if choice is None else sglang.arguments(choice, deployment.advice)
    variables = {} if choice is None else sglang.variables(choice)
    serving = ["--host", deployment.host, "--port", str(deployment.port), "--served-model-name", deployment.served_name]
    lines = [deployment.headline, *([] if flags else [PLAIN.format("SGLang")]), *notes]
    return DeployFiles({"sglang.sh": script(lines, [sglang.command(deployment.advice.target, variables), serving, *flags])})
