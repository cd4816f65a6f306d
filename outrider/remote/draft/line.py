"""How far a draft service is, for those who ask before they use one: `outrider tune --draft-endpoint`."""

from __future__ import annotations

from outrider.demo import demo_paths
from outrider.errors import ConfigError
from outrider.models.loading.load import load_config, load_tokenizer
from outrider.models.source import resolve
from outrider.options import DEMO, Options
from outrider.remote.draft.connection import Connection
from outrider.remote.draft.drafter_settings import RemoteSettings
from outrider.remote.endpoint import Endpoint
from outrider.remote.identity import model_identity


def round_trip_s(settings: RemoteSettings, target: Options, wait_s: float) -> float:
    """Median seconds there and back. Of the target only its tokenizer is read, whose vocabulary the service must have.

    Raises CapabilityError for another vocabulary or another kind of service, ConfigError for a token that is not taken,
    ServerError where nothing answers.
    """
    name = str(demo_paths().target) if target.target == DEMO else target.target
    source = resolve(name, target.revision)
    config = load_config(source, target.trust_remote_code)
    tokenizer = load_tokenizer(source, target.trust_remote_code)
    if tokenizer is None:
        raise ConfigError(f"'{target.target}' has no tokenizer, so nobody can compare its tokens with a draft service's")
    identity = model_identity(target.target, tokenizer, config.get_text_config().vocab_size)
    return Connection(Endpoint.parse(settings.address, "--draft-endpoint"), settings.security(), identity).measure(wait_s)
