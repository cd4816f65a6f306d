"""Two real engines in one process behind one application: other targets, other drafters, another
number of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from outrider import LLM
from outrider.build import Options
from outrider.engine.engine import Engine, make_engine
from outrider.engine.request import EngineSettings
from outrider.models.heads.eagle_files import save_eagle
from outrider.sampling.params import SamplingParams
from outrider.serve.app import make_app
from outrider.serve.rules import Rule
from outrider.serve.served import ServerState
from outrider.serve.settings import ServedModel, ServerSettings
from tests.heads import random_eagle
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama

TOKENS = 16
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Options]:
    """A target with a draft model, and one of another shape with a head that reads its hidden
    states."""
    folder = tmp_path_factory.mktemp("two")
    tokenizer = byte_tokenizer()
    first = tiny_llama(257, sharpness=4.0)
    second = tiny_llama(257, seed=9, sharpness=4.0, hidden_size=32, num_hidden_layers=3)
    for name, model in (("first", first), ("draft", disturbed(first, 0.05)), ("second", second)):
        save_checkpoint(folder / name, model, tokenizer)
    save_eagle(random_eagle("eagle3", second.config), folder / "head")
    parts = {"first": ("draft-model", "draft", 1), "second": ("eagle3", "head", 2)}
    return {
        name: Options(
            str(folder / name),
            drafter=drafter,
            draft=str(folder / draft),
            num_draft_tokens=3,
            threads=threads,
        )
        for name, (drafter, draft, threads) in parts.items()
    }


@pytest.fixture(scope="module")
def engines(options: dict[str, Options]) -> Iterator[dict[str, Engine]]:
    before = torch.get_num_threads()
    made = {}
    for name, one in options.items():
        extra = ("ngram",) if name == "first" else ()
        made[name] = make_engine(
            one, EngineSettings(max_num_seqs=4, kv_memory=16 << 20), extra_drafters=extra, name=name
        )
    for engine in made.values():
        engine.start()
    yield made
    for engine in made.values():
        assert engine.drain(60)
        engine.stop()
        engine.check_integrity()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def client(options: dict[str, Options], engines: dict[str, Engine]) -> Iterator[TestClient]:
    rules = (
        Rule(model="auto", max_prompt_tokens=20, to="second"),
        Rule(model="auto", to="first", drafter="ngram"),
    )
    models = tuple(ServedModel(name=name, options=one) for name, one in options.items())
    state = ServerState(ServerSettings(models=models, rules=rules))
    state.serve(list(engines.values()), created=1)
    with TestClient(make_app(state), raise_server_exceptions=False) as client:
        yield client


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 31 + index * 7 + index * index // 3) % 250 + 1 for index in range(length)]


def asked(client: TestClient, model: str, tokens: list[int], **fields: Any) -> Any:
    body = {"model": model, "prompt": tokens, "max_tokens": TOKENS, "temperature": 0}
    response = client.post(
        "/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True, **fields}
    )
    assert response.status_code == 200, response.text
    return response.json()


def tokens_of(answer: Any) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


@pytest.mark.slow
def test_both_answer_at_once_what_each_says_alone(
    client: TestClient, options: dict[str, Options]
) -> None:
    """Greedy ones as plain decoding, seeded ones as one at a time; the drafters know their own
    rows."""
    prompts = [prompt(length, seed) for seed, length in enumerate((5, 40, 300, 17))]
    seeded = {"temperature": 0.9, "seed": 11}
    jobs = [
        (name, tokens, fields) for tokens in prompts for fields in ({}, seeded) for name in NAMES
    ]
    alone = [tokens_of(asked(client, name, tokens, **fields)) for name, tokens, fields in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: asked(client, job[0], job[1], **job[2]), jobs))
    assert [tokens_of(answer) for answer in answers] == alone
    assert [answer["model"] for answer in answers] == [name for name, _, _ in jobs]
    for name in NAMES:
        plain = LLM(options[name].target, drafter="none", threads=options[name].threads)
        expected = [
            done.token_ids
            for done in plain.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        ]
        greedy = [
            tokens
            for (model, _, fields), tokens in zip(jobs, alone, strict=True)
            if model == name and not fields
        ]
        assert greedy == expected
    assert {answer["metrics"]["drafter"] for answer in answers} == {"draft-model", "eagle3"}


def test_a_route_chooses_the_model_by_the_prompt(client: TestClient) -> None:
    """By length, and with another drafter than the model's first."""
    short, long = (asked(client, "auto", prompt(length, 5)) for length in (9, 60))
    assert (short["model"], short["metrics"]["drafter"]) == ("second", "eagle3")
    assert (long["model"], long["metrics"]["drafter"]) == ("first", "ngram")


def test_each_engine_computes_with_its_own_number_of_threads(engines: dict[str, Engine]) -> None:
    """An engine keeps its number of threads after a later one changed torch's number for the
    process."""
    found: dict[str, int] = {}
    for name, engine in engines.items():
        heard = threading.Event()

        def look(name: str = name, heard: threading.Event = heard) -> None:
            found[name] = torch.get_num_threads()
            heard.set()

        engine._mailbox.put(look)
        assert heard.wait(60)
    assert found == {"first": 1, "second": 2}
