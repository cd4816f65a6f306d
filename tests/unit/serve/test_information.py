"""Models, tokens, health, routes: what is not generation."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from outrider.errors import CapabilityError
from outrider.serve.api.texts import SharedTokenizer
from outrider.serve.rules import Rule
from outrider.version import __version__
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, error_of, serving
from tests.unit.serve.written_tools import TOOLS


def test_models_are_listed_with_what_they_can() -> None:
    with serving(FakeEngine(name="org/a"), FakeEngine(name="b", drafters=["none"])) as client:
        listed = client.get("/v1/models").json()
        one = client.get("/v1/models/org/a").json()
        error_of(client.get("/v1/models/c"), 404)
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["org/a", "b"]
    assert one == listed["data"][0]
    assert (one["object"], one["owned_by"], one["max_model_len"]) == ("model", "outrider", 200)
    assert one["drafters"] == ["draft-model", "ngram"]


def test_models_say_what_kind_they_are() -> None:
    """The demo under another name, or a model without a chat template, that is taken for a chat
    model of any size."""
    base = FakeEngine(name="base", num_parameters=1)
    base.tokenizer.chat_template = None
    engines = [
        FakeEngine(name="large", num_parameters=500_000_000),
        FakeEngine(name="small", num_parameters=499_999_999),
        FakeEngine(name="called so", num_parameters=1, is_demo=True),
        base,
    ]
    with serving(*engines) as client:
        cards = client.get("/v1/models").json()["data"]
    assert {card["id"]: card["kind"] for card in cards} == {
        "large": "chat",
        "small": "small-chat",
        "called so": "demo",
        "base": "text",
    }


def test_tokenize_and_detokenize_are_inverse() -> None:
    with serving(FakeEngine()) as client:
        found = client.post("/tokenize", json={"prompt": "Grüße", "return_token_strs": True}).json()
        assert found["count"] == 7
        assert found["max_model_len"] == 200
        assert found["token_strs"][2] == "bytes:\\xc3"
        assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {
            "prompt": "Grüße"
        }
        rendered = client.post("/tokenize", json={"messages": chat()["messages"]}).json()["tokens"]
        assert (
            client.post("/detokenize", json={"tokens": rendered}).json()["prompt"]
            == "<user>Hi<assistant>"
        )
        assert (
            error_of(client.post("/detokenize", json={"tokens": [257]}), 400)["param"] == "tokens"
        )
        assert error_of(client.post("/tokenize", json={}), 400)["param"] == "prompt"
        for unread in ({"tools": TOOLS}, {"add_generation_prompt": False}):
            (name,) = unread
            assert (
                error_of(client.post("/tokenize", json={"prompt": "x", **unread}), 400)["param"]
                == name
            )


def test_health_is_about_life_and_ready_about_taking_requests() -> None:
    engine = FakeEngine()
    with serving(engine) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").json()["status"] == "ready"
        client.state.draining = True
        assert client.get("/health").status_code == 200
        assert error_of(client.get("/ready"), 503)["code"] == "shutting_down"
        refused = client.post("/v1/chat/completions", json=chat())
        assert error_of(refused, 503)["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        client.state.draining = False
        client.state.loading = True
        assert error_of(client.get("/ready"), 503)["code"] == "loading"
        assert (
            error_of(client.post("/v1/completions", json={"prompt": "a"}), 503)["code"] == "loading"
        )
        client.state.loading = False
        engine.failed = "RuntimeError: gone"
        assert "RuntimeError: gone" in error_of(client.get("/health"), 503)["message"]


def test_an_engine_that_hangs_fails_health_and_ready_until_it_comes_round() -> None:
    """The answer names the engine, the time it hangs and the limit; 0 allows everything."""
    engine = FakeEngine(turn_age_s=59.0)
    with serving(engine, FakeEngine(name="other")) as client:
        assert client.get("/health").status_code == 200
        engine.turn_age_s = 61.0
        for path in ("/health", "/ready"):
            error = error_of(client.get(path), 503)
            assert error["code"] == "engine_hung"
            assert (
                "'fake' has work and has not come round for 61 s; more than 60 s"
                in error["message"]
            )
            assert "--hang-timeout" in error["message"]
            assert "other" not in error["message"]
        engine.turn_age_s = 0.0
        assert [client.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
    engine = FakeEngine(turn_age_s=1e6)
    with serving(engine, hang_timeout_s=0.0) as client:
        assert client.get("/health").status_code == 200


def test_version_metrics_page_and_document() -> None:
    with serving(FakeEngine()) as client:
        assert client.get("/version").json() == {"version": __version__}
        client.post("/v1/chat/completions", json=chat())
        client.get("/no/such/path")
        page = client.get("/metrics").text
        assert (
            'outrider:http_responses_total{route="/v1/chat/completions",status="200"} 1.0' in page
        )
        assert "/no/such/path" not in page, "raw paths would let anybody fill the metrics"
        assert "<html" in client.get("/").text
        document = client.get("/openapi.json").json()
    assert document["info"]["title"] == "Outrider"
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
    ):
        assert path in document["paths"], path
    schemas = document["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["speculation"]
    assert schemas["ChatBody"]["additionalProperties"] is True
    assert schemas["SpeculationFields"]["additionalProperties"] is False


def test_the_documentation_needs_no_network() -> None:
    """Its scripts and styles are the server's own."""
    with serving(FakeEngine()) as client:
        page = client.get("/docs").text
        parts = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert any(part.endswith(".js") for part in parts)
        assert any(part.endswith(".css") for part in parts)
        for part in parts:
            assert client.get(part).status_code == 200, part


def test_the_documentation_offers_requests_that_are_answered() -> None:
    """Catches what a page makes up of a schema: every field at once, temperature 1e30."""
    with serving(FakeEngine()) as client:
        offered = 0
        for path, methods in client.get("/openapi.json").json()["paths"].items():
            if "requestBody" not in methods.get("post", {}):
                continue
            content = methods["post"]["requestBody"]["content"]["application/json"]
            (example,) = content["examples"].values()
            response = client.post(path, json=example["value"])
            assert response.status_code == 200, (path, response.text)
            offered += 1
    assert offered == 8


class TestRoutes:
    def asked(
        self, rules: tuple[Rule, ...], body: dict, path: str = "/v1/chat/completions"
    ) -> tuple[str, str | None]:
        """(who answered, with which drafter)."""
        small = FakeEngine(name="small")
        large = FakeEngine(name="large")
        with serving(small, large, rules=rules) as client:
            response = client.post(path, json=body)
            assert response.status_code == 200, response.text
            engine = small if small.seen else large
            assert response.json()["model"] == engine.name
            return engine.name, engine.seen[0].speculation.drafter

    def test_by_length(self) -> None:
        rules = (
            Rule(model="auto", max_prompt_tokens=30, to="small"),
            Rule(model="auto", to="large"),
        )
        assert self.asked(rules, chat(model="auto"))[0] == "small"
        assert self.asked(rules, chat("x" * 50, model="auto"))[0] == "large"

    def test_by_endpoint_and_form(self) -> None:
        rules = (
            Rule(endpoint="completions", drafter="ngram"),
            Rule(structured=True, to="small", drafter="draft-model"),
        )
        assert self.asked(rules, {"model": "large", "prompt": "a"}, "/v1/completions") == (
            "large",
            "ngram",
        )
        assert self.asked(rules, chat(model="large")) == ("large", None)
        form = {"type": "json_object"}
        assert self.asked(rules, chat(model="large", response_format=form)) == (
            "small",
            "draft-model",
        )

    def test_what_the_client_says_wins(self) -> None:
        rules = (Rule(mode="fixed", max_draft_tokens=2, drafter="ngram"),)
        assert self.asked(rules, chat(model="small", speculation={"drafter": "draft-model"})) == (
            "small",
            "draft-model",
        )
        assert self.asked(rules, chat(model="small", speculation={"mode": "off"})) == (
            "small",
            None,
        )

    def test_names_of_routes_are_listed(self) -> None:
        with serving(
            FakeEngine(name="small"), rules=(Rule(model="auto", max_prompt_tokens=20, to="small"),)
        ) as client:
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [
                "small",
                "auto",
            ]
            lost = error_of(
                client.post("/v1/chat/completions", json=chat("x" * 90, model="auto")), 404
            )
            assert "no route fits" in lost["message"]


def test_a_tokenizer_without_a_vocabulary_to_read_is_refused() -> None:
    with pytest.raises(
        CapabilityError, match="this model's SimpleNamespace is Python code of its own"
    ):
        SharedTokenizer(SimpleNamespace(added_tokens_decoder={}), "odd")
