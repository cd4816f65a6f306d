"""SGLang: a script with the launch command."""

from __future__ import annotations

from outrider.deploy.deployment import Deployment
from outrider.deploy.files import DeployFiles, script
from outrider.deploy.vllm import PLAIN
from outrider.lab.tune.launch_lines import SGLANG, sglang_arguments, sglang_command, sglang_variables


def files(deployment: Deployment) -> DeployFiles:
    """`sglang.sh`. Raises CapabilityError where SGLang cannot do what the settings state."""
    choice, notes = deployment.ask(SGLANG)
    flags = [] if choice is None else sglang_arguments(choice, deployment.advice)
    variables = {} if choice is None else sglang_variables(choice)
    serving = ["--host", deployment.host, "--port", str(deployment.port), "--served-model-name", deployment.served_name]
    lines = [deployment.headline, *([] if flags else [PLAIN.format("SGLang")]), *notes]
    return DeployFiles({"sglang.sh": script(lines, [sglang_command(deployment.advice.target, variables), serving, *flags])})
