"""Other people's benchmark clients measure our server. Each runs from an environment of its own, for
their dependencies are not ours: `OUTRIDER_GUIDELLM`, `OUTRIDER_AIPERF` name the programs, or they are
on the path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.demo import demo_paths
from tests.live_server import KEY, live_server

pytestmark = pytest.mark.nightly

COUNT = 6
QUESTIONS = [
    f"Question: Sam has {number} apples and buys 4 more. How many apples does Sam have?"
    for number in range(3, 3 + COUNT)
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live_server("demo", "--drafter", "draft-model") as address:
        yield address


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    return path


def program(name: str) -> str:
    """The program, or a skip."""
    path = os.environ.get(f"OUTRIDER_{name.upper()}") or shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} here (OUTRIDER_{name.upper()})")
    return path


def run(*command: str) -> None:
    # with it AIPerf takes the folder of a tokenizer for a name on the hub
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_guidellm(address: str, prompts: Path, tmp_path: Path) -> None:
    """It counts tokens as we do, and finds the acceptance under vLLM's names."""
    out = tmp_path / "out.json"
    backend = f"kind=openai_http,target={address},request_format=/v1/chat/completions,api_key={KEY}"
    run(
        *(program("guidellm"), "run", "--backend", backend),
        *("--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={COUNT}"),
        *("--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={out}"),
        "--disable-progress",
    )
    requests = json.loads(out.read_text())["benchmarks"][0]["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (COUNT, 0)
    for request in requests["successful"]:
        assert request["output_tokens"] > 5
        assert request["output"].strip().startswith("Sam has")
        drafts: dict[str, Any] = request["response_metrics"]["speculative_decoding"]
        steps = sum(drafts["acceptance_histogram"])
        assert steps == drafts["num_spec_steps"]
        assert drafts["mean_acceptance_length"] > 2


def test_aiperf(address: str, tmp_path: Path) -> None:
    """Its acceptance lengths come from each answer's metrics."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in QUESTIONS))
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for file in demo_paths().target.glob("*.json"):
        shutil.copy(file, tokenizer)
    run(
        *(program("aiperf"), "profile", "--model", "demo", "--url", address, "--api-key", KEY),
        *("--endpoint-type", "chat", "--streaming", "--concurrency", "1", "--ui", "none"),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn"),
        *("--request-count", str(COUNT), "--tokenizer", str(tokenizer)),
        *("--use-server-token-count", "--artifact-dir", str(tmp_path / "out")),
    )
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == COUNT
    assert found["total_output_tokens"]["avg"] > 5 * COUNT
    assert found["spec_decode_acceptance_length"]["avg"] > 2
    steps = sum(found["pooled_spec_decode_acceptance_histogram"].values())
    assert steps == found["total_spec_decode_steps"]["avg"]
