"""`outrider serve --settings` in a container, as compose and Kubernetes both start it."""

from __future__ import annotations

from outrider.build import ENDPOINT_VARIABLE, LOCAL_SERVICE, REMOTE
from outrider.deploy.deployment import Deployment
from outrider.drafters import DRAFTERS
from outrider.errors import ConfigError
from outrider.settings import parse_settings
from outrider.settings_file import SettingsFile

FOLDER, FILE = "/etc/outrider", "settings.json"
KEY_VARIABLE = "OUTRIDER_API_KEY"
KEY, TOKEN_KEY = "api-key", "service-token"  # in a secret
USER = 10001  # of the image (deploy/Dockerfile)
GRACE_S = 60  # longer than serve's --set drain_timeout: running answers are finished first


def command(deployment: Deployment, settings: SettingsFile) -> list[str]:
    """The command line; `settings` are the container's. Threads are named, since a limit on processors hides none of them."""
    return [
        "outrider", "serve", settings.target, "--settings", f"{FOLDER}/{FILE}", "--served-model-name", deployment.served_name,
        "--host", "0.0.0.0", "--port", str(deployment.port), "--threads", str(deployment.cpus),
    ]  # fmt: skip


def secrets(settings: SettingsFile) -> dict[str, str]:
    """Environment variables that the container needs from outside -> their keys in a secret: what clients must send, and the
    token of a draft service. Raises ConfigError for a draft service without an address."""
    found = {KEY_VARIABLE: KEY}
    for options in settings.choices:
        if options.get("drafter") != REMOTE:
            continue
        own = parse_settings(DRAFTERS.load(REMOTE).Settings, options.get("drafter_options", {}), f"drafter '{REMOTE}'")
        if own.endpoint is None:
            raise ConfigError(
                f"the settings draft with '{REMOTE}' and do not say where the draft service is; {ENDPOINT_VARIABLE} of this "
                'machine is not known in a container: add "endpoint": "grpc://HOST:PORT" to their drafter_options'
            )
        if own.endpoint != LOCAL_SERVICE:
            found[own.token_env] = TOKEN_KEY
    return found
