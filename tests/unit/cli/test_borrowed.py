"""Command lines that people bring from vLLM and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.cli.borrowed import KEYS, METHODS, SAME, ours
from outrider.drafters import DRAFTERS
from outrider.errors import ConfigError
from outrider.settings import describe_settings

OPTIONS = [
    "--drafter",
    "--draft",
    "--max-tokens",
    "--temperature",
    "--threads",
    "--seed",
    "--max-model-len",
]


def test_a_command_line_of_llama_cpp(cli: Callable[..., Any], fake: Any) -> None:
    """-m, -p, -n, -c, -t, -md and --temp mean the same there."""
    fake.has_chat_template = False
    line = "-m demo -p Where? -n 9 --temp 0.5 -c 99 -t 1 --top-k 4 --repeat-penalty 1.1 -md d -s 3"
    assert cli("generate", *line.split()).code == 0
    target, options = fake.asked[0]
    assert (target, options.draft, options.max_model_len, options.threads) == ("demo", "d", 99, 1)
    assert fake.prompts == ["Where?"]
    given = fake.params[0]
    assert (
        given.max_tokens,
        given.temperature,
        given.top_k,
        given.repetition_penalty,
        given.seed,
    ) == (9, 0.5, 4, 1.1, 3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}',
            ["--drafter", "ngram k=4 max_ngram=5"],
        ),
        (
            '{"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}',
            ["--drafter", "eagle3 k=3", "--draft", "org/head"],
        ),
        ('{"model": "org/draft"}', ["--drafter", "draft-model", "--draft", "org/draft"]),
        ('{"method": "mtp"}', ["--drafter", "mtp"]),
    ],
)
def test_a_speculative_config_of_vllm(config: str, words: list[str]) -> None:
    assert ours(["demo", "--speculative-config", config], OPTIONS, ["target"]) == ["demo", *words]
    assert ours([f"--speculative-config={config}", "demo"], OPTIONS, ["target"]) == [*words, "demo"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "takes a JSON object"),
        ("[1]", "takes a JSON object"),
        ('{"method": "eagel3"}', "Did you mean 'eagle3'"),
        ('{"method": "ngram", "prompt_lookup_mx": 3}', "Did you mean 'prompt_lookup_max'"),
        ('{"draft_tensor_parallel_size": 2}', "means nothing here"),
    ],
)
def test_a_speculative_config_that_is_none(config: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(["--speculative-config", config], OPTIONS, ["target"])


def test_what_a_verb_has_itself_stays() -> None:
    """A verb's own --model is not another name of TARGET, and words after -- are words."""
    assert ours(["--model", "x", "-n", "3"], ["--model", "-n"], ["target"]) == [
        "--model",
        "x",
        "-n",
        "3",
    ]
    assert ours(["-n", "3", "--", "-n"], OPTIONS, ["prompt"]) == ["--max-tokens", "3", "--", "-n"]
    assert ours(["-n", "3"], ["--limit"], []) == ["-n", "3"]


def test_the_table_leads_to_what_exists() -> None:
    """Options of drafters that were renamed, and drafters that went."""
    assert set(METHODS.values()) <= set(DRAFTERS.names())
    settings = {
        name
        for drafter in ("ngram", "suffix")
        for name in describe_settings(DRAFTERS.load(drafter).Settings)
    }
    assert {*KEYS.values()} - {"k"} <= settings
    assert not set(SAME) & set(SAME.values())
