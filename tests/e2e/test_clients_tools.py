"""Two tools that strangers will point at the server: lm-evaluation-harness and schemathesis."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from outrider.demo import demo_paths
from tests.live_server import KEY, live_server

pytestmark = pytest.mark.slow

NUM_PROBLEMS = 8
REQUEST_TIMEOUT_S = 60  # schemathesis may ask for a hundred answers of a thousand tokens each
GENERATE = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{reference}}}}"
generation_kwargs: {{until: ["Question:"], max_gen_toks: 120, temperature: {temperature}, speculation: {speculation}}}
filter_list: [{{name: last, filter: [{{function: regex, regex_pattern: "#### (-?[0-9]+)"}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOOSE = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live_server(
        "demo", "--drafter", "draft-model", "--request-timeout", f"{REQUEST_TIMEOUT_S}"
    ) as address:
        yield address


# ---- lm-evaluation-harness


@pytest.fixture(scope="module")
def problems(tmp_path_factory: Any) -> Path:
    """Held-out problems of the demo; for the choice, the right solution against solutions of other
    problems."""
    source = (
        files("outrider.lab.workload.embedded")
        .joinpath("demo.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    records = [json.loads(line) for line in source[: NUM_PROBLEMS + 2]]
    file = tmp_path_factory.mktemp("task") / "problems.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for index in range(NUM_PROBLEMS):
            others = records[index : index + 3]
            choices = [other["solution"] for other in others]
            out.write(json.dumps({**records[index], "choices": choices}) + "\n")
    return file


def score(address: str, folder: Path, task: str, text: str) -> dict[str, Any]:
    """Run one task through the command line of lm-eval, as its users do."""
    pytest.importorskip("lm_eval")
    (folder / f"{task}.yaml").write_text(text, encoding="utf-8")
    client = {
        "model": "demo",
        "base_url": f"{address}/v1/completions",
        "tokenizer": demo_paths().target,
        "add_bos_token": True,
        "max_retries": 1,
        "num_concurrent": 4,
    }
    arguments = ",".join(f"{name}={value}" for name, value in client.items())
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--tasks",
        task,
        "--include_path",
        str(folder),
        "--output_path",
        str(folder / "out"),
        "--log_samples",
    ]
    environment = {
        **os.environ,
        "OPENAI_API_KEY": KEY,
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (file,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    answers = [
        json.loads(line)["resps"] for line in samples.read_text(encoding="utf-8").splitlines()
    ]
    return {
        "results": json.loads(file.read_text(encoding="utf-8"))["results"][task],
        "answers": answers,
    }


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_lm_eval_scores_the_same_with_and_without_speculation(
    address: str, problems: Path, tmp_path: Path, temperature: float
) -> None:
    """The whole promise, as an evaluator sees it: the score and every single answer."""
    runs = []
    modes = {
        "auto": "{mode: auto}",
        "fixed": "{mode: fixed, max_draft_tokens: 4}",
        "off": "{mode: 'off'}",
    }
    for mode, speculation in modes.items():
        folder = tmp_path / mode
        folder.mkdir()
        text = GENERATE.format(
            task=f"demo_{mode}", data=problems, temperature=temperature, speculation=speculation
        )
        runs.append(score(address, folder, f"demo_{mode}", text))
    auto, fixed, off = runs
    assert auto["answers"] == fixed["answers"] == off["answers"]
    exact = [run["results"]["exact_match,last"] for run in runs]
    assert exact[0] == exact[1] == exact[2]
    assert exact[0] >= (0.6 if temperature == 0 else 0.25)


def test_lm_eval_likelihoods(address: str, problems: Path, tmp_path: Path) -> None:
    """Echoed log-probabilities, shifted by one token or read from the wrong position, choose at
    random."""
    found = score(
        address, tmp_path, "demo_choose", CHOOSE.format(task="demo_choose", data=problems)
    )
    assert found["results"]["acc,none"] == 1


# ---- schemathesis


@pytest.mark.slow
def test_schemathesis_finds_no_500(address: str, tmp_path: Path) -> None:
    """Bodies made from the OpenAPI document, right and wrong ones: refused or answered, never a
    failure of ours."""
    pytest.importorskip("schemathesis")
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{address}/openapi.json",
        "--checks",
        "not_a_server_error",
        "--max-examples",
        "15",
        "--phases",
        "examples,coverage,fuzzing",
        "--seed",
        "1",
        "--no-shrink",
        "--request-timeout",
        str(2 * REQUEST_TIMEOUT_S),
        "-H",
        f"Authorization: Bearer {KEY}",
        "--continue-on-failure",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


# ---- bodies at the edge of what is allowed, which a generator from the schema alone hardly ever hits


EDGES: dict[str, list[Any]] = {
    "temperature": [0, 1e-6, 1, 2, 100.0], "top_p": [1e-9, 0.5, 1], "top_k": [-1, 0, 1, 10**6], "min_p": [0, 0.5, 1],
    "presence_penalty": [-2, 2], "frequency_penalty": [-2, 0.1], "repetition_penalty": [0.01, 5.0],
    "seed": [0, -(2**63), 2**64 - 1], "logit_bias": [{}, {"0": 100}, {"4095": -100}, {"4096": 1}],
    "allowed_token_ids": [[5], [5, 6, 7], [], [10**7]], "stop": ["", [], "\n", [" "] * 4, "\ud83d"],
    "stop_token_ids": [[0], [4095], [-1]], "ignore_eos": [True], "n": [1, 3],
    "max_tokens": [1, 17], "return_token_origins": [True], "return_token_ids": [True], "priority": [-(2**40), 7],
    "prediction": [{"type": "content", "content": "How many? 12."}, {"type": "content", "content": []}, {"type": "text"}],
    "include_stop_str_in_output": [True, False], "stream": [True], "stream_options": [{"include_usage": True}],
    "user": ["", "x" * 1000],
    "speculation": [
        {"mode": "off"}, {"mode": "fixed", "max_draft_tokens": 512}, {"mode": "fixed", "max_draft_tokens": 1, "invariant": True},
        {"invariant": False}, {"lossy": "typical"}, {},
    ],
}  # fmt: skip
OF_CHAT = {
    "logprobs": [True],
    "top_logprobs": [0, 20],
    "tool_choice": ["auto"],
    "response_format": [{"type": "json_object"}],
}
OF_COMPLETIONS = {
    "logprobs": [0, 5],
    "echo": [True],
    "best_of": [3],
    "suffix": ["x"],
    "prompt_logprobs": [0, 3],
}
NUM_BODIES = 60


def status_of(address: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_odd_but_almost_valid_bodies(address: str, path: str) -> None:
    """A few fields at once, each at an edge: an answer or a refusal that names a field, and the
    server lives on."""
    chance = random.Random(path)
    is_chat = path.endswith("chat/completions")
    edges = EDGES | (OF_CHAT if is_chat else OF_COMPLETIONS)
    base = (
        {"messages": [{"role": "user", "content": "How many?"}]}
        if is_chat
        else {"prompt": ["How many?", "And why?"]}
    )
    statuses = []
    for _ in range(NUM_BODIES):
        chosen = chance.sample(sorted(edges), chance.randint(1, 4))
        body = {**base, "max_tokens": 9, **{field: chance.choice(edges[field]) for field in chosen}}
        status, body_text = status_of(address, path, body)
        assert status in (200, 400), (body, body_text)
        assert "server_error" not in body_text, (body, body_text)  # a stream says it inside
        if status == 400:
            assert json.loads(body_text)["error"]["message"]
        statuses.append(status)
    assert statuses.count(200) >= NUM_BODIES // 5
    assert status_of(address, path, {**base, "max_tokens": 5})[0] == 200
