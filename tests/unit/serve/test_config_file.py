"""--config: several models and routes from TOML; what cannot be is refused with its line in the
file."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.serve.config_file import read_config
from outrider.serve.rules import Rule
from outrider.serve.served import ServerState
from tests.unit.serve.fake_engine import FakeEngine

WHOLE = """
[server]
port = 9000
api_keys = ["k"]
request_timeout = 5
cors_origins = ["*"]
strict = true

[[models]]
name = "small"
target = "demo"
drafter = "ngram"
drafter_options = { max_ngram = 3 }
max_num_seqs = 4
kv_memory = 2000000
extra_drafters = ["suffix"]

[[models]]
target = "org/large"
draft = "org/draft"
num_draft_tokens = "auto:8"
runtime = "eager"

[[routes]]
model = "auto"
tools = true
to = "org/large"

[[routes]]
model = "auto"
max_prompt_tokens = 100
to = "small"
mode = "fixed"
max_draft_tokens = 2
"""


def read(tmp_path: Path, text: str, **given: object) -> object:
    path = tmp_path / "server.toml"
    path.write_text(text)
    return read_config(path, given)


def test_everything_arrives_where_it_belongs(tmp_path: Path) -> None:
    settings = read(tmp_path, WHOLE, port=1)
    assert (
        settings.port,
        settings.api_keys,
        settings.request_timeout_s,
        settings.cors_origins,
    ) == (1, ("k",), 5.0, ("*",))
    assert settings.strict
    small, large = settings.models
    assert (small.name, small.options.drafter, small.options.drafter_options) == (
        "small",
        "ngram",
        {"max_ngram": 3},
    )
    assert (small.engine.max_num_seqs, small.engine.kv_memory, small.extra_drafters) == (
        4,
        2_000_000,
        ("suffix",),
    )
    assert (large.name, large.options.draft, large.options.num_draft_tokens) == (
        "org/large",
        "org/draft",
        "auto:8",
    )
    assert settings.rules[1] == Rule(
        model="auto", max_prompt_tokens=100, to="small", mode="fixed", max_draft_tokens=2
    )


MODEL = '[[models]]\ntarget = "demo"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "is not TOML"),
        ("[sever]\nport = 1", "Did you mean 'server'?"),
        ("[server]\nprot = 1\n" + MODEL, "unknown key 'prot'. Did you mean 'port'?"),
        ('[server]\nport = "many"\n' + MODEL, "port must be a whole number, got 'many'"),
        ("[server]\nport = 99999\n" + MODEL, "port must be at least 0 and at most 65535"),
        ('[server]\nport = "80"\n' + MODEL, "port must be a whole number, got '80'"),
        ("[server]\nstrict = 1\n" + MODEL, "strict must be true or false, got 1"),
        (
            '[server]\nlog_level = "warn"\n' + MODEL,
            "log_level must be 'debug', 'info', 'warning' or",
        ),
        ('[server]\napi_keys = ["a", 3]\n' + MODEL, "api_keys[1] must be a text, got 3"),
        ("[server]\nrequest_timeout = nan\n" + MODEL, "request_timeout must be above 0"),
        ("[server]\ndrain_timeout = nan\n" + MODEL, "drain_timeout must be at least 0 (seconds"),
        ("[server]\nhang_timeout = nan\n" + MODEL, "hang_timeout must be a finite number, got nan"),
        ("[server]\nhang_timeout = inf\n" + MODEL, "hang_timeout must be a finite number, got inf"),
        ('[server]\nrules = [{to = "demo"}]\n' + MODEL, "unknown key 'rules'"),
        ("", "no model to serve"),
        ("[[models]]\nname = 'a'", "'target' is missing"),
        (MODEL + 'draftr = "x"', "Did you mean 'draft"),
        (MODEL + "max_num_seqs = 0", "[[models]] number 1: max_num_seqs must be at least 1 ("),
        (MODEL + MODEL, "used twice"),
        (MODEL + '[[routes]]\nto = "dmo"', "Did you mean 'demo'?"),
        (MODEL + "[[routes]]\ntools = true", "must lead to a model"),
        (MODEL + '[[routes]]\nmodel = "auto"\ndrafter = "ngram"', "which one answers"),
        (
            MODEL + '[[routes]]\nendpoint = "images"\nto = "demo"',
            "endpoint must be 'chat' or 'completions'",
        ),
        (MODEL + '[[routes]]\nmode = "off"\ndrafter = "ngram"', "leave out drafter"),
        (MODEL + 'generation_config = "vllm"', "generation_config must be auto, none or a folder"),
        ("models = 3", "must be a list of tables"),
        ('[server]\nssl_keyfile = "/x"\n' + MODEL, "TLS needs both"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_missing_file() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(Path("/no/such/file.toml"), {})


def test_route_to_a_drafter_that_is_not_loaded(tmp_path: Path) -> None:
    settings = read(tmp_path, MODEL + '[[routes]]\nendpoint = "chat"\ndrafter = "ngrm"')
    with pytest.raises(ConfigError, match="Did you mean 'ngram'"):
        ServerState(settings).serve([FakeEngine(name="demo")], created=0)
