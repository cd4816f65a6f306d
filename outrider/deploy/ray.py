"""Ray Serve LLM: a configuration file for `serve run`, with vLLM as the engine behind it."""

from __future__ import annotations

from typing import Any

from outrider.deploy.deployment import Deployment
from outrider.deploy.files import DeployFiles, as_yaml
from outrider.deploy.vllm import PLAIN, arguments

BUILDER = "ray.serve.llm:build_openai_app"


def files(deployment: Deployment) -> DeployFiles:
    """`ray.yaml`. Raises CapabilityError where vLLM cannot do what the settings state."""
    found, notes = arguments(deployment)
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": deployment.served_name, "model_source": deployment.advice.target},
        "deployment_config": {
            "autoscaling_config": {"min_replicas": deployment.replicas, "max_replicas": deployment.max_replicas}
        },
    }
    if found:
        config["engine_kwargs"] = found
    lines = [
        deployment.headline, *([PLAIN.format("vLLM, by Ray,")] if not found else []), *notes,
        "Start: serve run ray.yaml (pip install 'ray[serve,llm]'). A replica takes one GPU unless accelerator_config says less.",
    ]  # fmt: skip
    application = {
        "name": deployment.name, "route_prefix": "/", "import_path": BUILDER, "args": {"llm_configs": [config]},
    }  # fmt: skip
    http = {"host": deployment.host, "port": deployment.port}
    return DeployFiles({"ray.yaml": as_yaml(lines, {"http_options": http, "applications": [application]})})
