"""`outrider serve --settings` in a container, as compose and Kubernetes both start it."""

from __future__ import annotations

from outrider.deploy.deployment import Deployment
from outrider.settings_file import SettingsFile

FOLDER, FILE = "/etc/outrider", "settings.json"
KEY_VARIABLE = "OUTRIDER_API_KEY"
USER = 10001  # of the image (deploy/Dockerfile)
GRACE_S = 60  # longer than serve's --set drain_timeout: running answers are finished first


def command(deployment: Deployment, settings: SettingsFile) -> list[str]:
    """The command line; `settings` are the container's. Threads are named, since a limit on processors hides none of them."""
    return [
        "outrider", "serve", settings.target, "--settings", f"{FOLDER}/{FILE}", "--served-model-name", deployment.served_name,
        "--host", "0.0.0.0", "--port", str(deployment.port), "--threads", str(deployment.cpus),
    ]  # fmt: skip
