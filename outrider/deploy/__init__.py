"""The files that `outrider deploy` writes: they start a server with the drafting that `outrider tune` found.

One module per engine: a function from `Deployment` to `DeployFiles`. vLLM, SGLang and Ray get those of
`lab/tune/launch_lines.py`; compose and k8s run `outrider serve --settings`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from outrider.deploy.deployment import Deployment
from outrider.deploy.files import DeployFiles
from outrider.errors import ConfigError, did_you_mean

ENGINES = {
    "vllm": "outrider.deploy.vllm",
    "sglang": "outrider.deploy.sglang",
    "ray": "outrider.deploy.ray",
    "compose": "outrider.deploy.compose",
    "k8s": "outrider.deploy.kubernetes",
}
OTHERS = ("vllm", "sglang", "ray")  # engines that are not ours


def check_engine(name: str) -> None:
    """Raises ConfigError with the nearest name."""
    if name not in ENGINES:
        raise ConfigError(f"nothing called '{name}' to deploy with.{did_you_mean(name, ENGINES)}")


def files_for(engine: str, deployment: Deployment) -> DeployFiles:
    """All files of one engine, the main one first. Raises ConfigError, and CapabilityError for what the engine cannot do."""
    write: Callable[[Deployment], DeployFiles] = import_module(ENGINES[engine]).files
    return write(deployment)
