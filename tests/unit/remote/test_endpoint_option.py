"""`--draft-endpoint`, the short option for a draft service: what it sets, and what it contradicts."""

from __future__ import annotations

import pytest

from outrider.build import choose
from outrider.cli.options import ModelOptions
from outrider.errors import ConfigError
from outrider.options import Options


def test_it_stands_for_drafter_remote() -> None:
    """Chains, so the default verifier; the same from the command line."""
    for options in (
        Options("demo", draft_endpoint="grpc://a:1"),
        Options("demo", drafter="remote", drafter_options={"endpoint": "grpc://a:1"}),
        Options("demo", **ModelOptions(draft_endpoint="grpc://a:1").llm_arguments()),
    ):
        resolved, parts = choose(options)
        assert (resolved.drafter, parts.drafter_settings.endpoint, parts.verifier.name) == (
            "remote",
            "grpc://a:1",
            "block",
        )
        assert choose(resolved)[0] == resolved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "ngram", "draft_endpoint": "grpc://a:1"}, "drafter 'ngram' was asked for"),
        (
            {"draft_endpoint": "grpc://a:1", "drafter_options": {"endpoint": "grpc://b:1"}},
            "two draft services",
        ),
        ({"draft_endpoint": "grpc://a:1", "draft": "somewhere"}, "uses no draft model"),
        ({"draft_endpoint": "http://a:1"}, "OpenAI server's"),
        (
            {"drafter": "remote", "drafter_options": {"probs": "on"}},
            "probs must be 'auto' or 'off'",
        ),
        (
            {
                "draft_endpoint": "grpc://a:1",
                "verifier": "traversal",
                "drafter_options": {"tree": "2x2"},
            },
            "no option 'tree'",
        ),
    ],
)
def test_contradictions(options: dict[str, object], message: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match=message):
        choose(Options("demo", **options))  # type: ignore[arg-type]
