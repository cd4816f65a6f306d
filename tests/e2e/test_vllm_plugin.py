"""Our drafters in a real vLLM, where one is installed (OUTRIDER_VLLM_PYTHON, or .peers/vllm of
benchmarks/setup_peers.sh)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from outrider.demo import demo_paths
from outrider.lab.tune.launch_lines import launch_lines
from outrider.lab.workload.load import load_workload
from tests.unit.lab.tune.test_launch_lines import result

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = Path(
    os.environ.get("OUTRIDER_VLLM_PYTHON", REPOSITORY / ".peers" / "vllm" / "bin" / "python")
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no vLLM here (OUTRIDER_VLLM_PYTHON, benchmarks/setup_peers.sh)"
    ),
]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip
OURS = {
    "method": "custom_class",
    "model": "outrider.integrations.vllm.Proposer",
    "num_speculative_tokens": 5,
}


def there(script: str, timeout_s: float = 600, **environment: str) -> Any:
    """What a script in vLLM's Python leaves in `answer`, by JSON."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONHOME", "VIRTUAL_ENV")
    }
    path = os.pathsep.join([str(REPOSITORY)])
    done = subprocess.run(
        [str(PYTHON), "-c", f"import json\n{script}\nprint('\\nANSWER ' + json.dumps(answer))"],
        env={**kept, **SETTINGS, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("ANSWER "))


@pytest.fixture(scope="module")
def target() -> Path:
    """The embedded target, which solves word problems and says their numbers again and again."""
    return Path(demo_paths().target)


def word_problems(target: Path, count: int) -> list[list[int]]:
    """Prompts of growing length: one, two, ... solved problems, then one to be solved."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    requests = load_workload("demo").requests
    texts = [str(request.prompt) for request in requests]
    return [
        tokenizer("\n".join(texts[: 1 + n % 3] + texts[n : n + 1])).input_ids for n in range(count)
    ]


GENERATE = """
import vllm
from outrider.integrations.vllm import plugin
plugin.register()
texts, counted = {{}}, {{}}
for name, speculative, additional in {cases}:
    llm = vllm.LLM(
        model={target!r}, dtype="float32", max_model_len=256, max_num_seqs=3, max_num_batched_tokens=64, enforce_eager=True,
        disable_log_stats=False, seed=0, speculative_config=speculative, additional_config=additional,
        block_size=32, num_gpu_blocks_override=13,
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
    prompts = [{{"prompt_token_ids": prompt}} for prompt in {prompts}]
    done = llm.generate(prompts, params, use_tqdm=False)
    texts[name] = [list(one.outputs[0].token_ids) for one in done]
    counted[name] = {{m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}}
    del llm
from prometheus_client import REGISTRY, generate_latest
answer = {{"texts": texts, "counted": counted, "page": generate_latest(REGISTRY).decode()}}
"""


def test_texts_stay_what_they_are(target: Path) -> None:
    """Ten prompts in a batch of three, chunked prefill (64 tokens a step), prefix caching, and too
    few pages for all, so that requests are preempted: the text is vLLM's own, and drafts were
    accepted. vLLM's page shows our counters."""
    prompts = word_problems(target, 8)
    prompts += [prompts[3], prompts[3]]  # the same question again
    cases: list[tuple[str, Any, Any]] = [("plain", None, {})]
    for drafter in ("ngram", "suffix", "composite"):
        cases.append((drafter, OURS, {"outrider": {"drafter": drafter}}))
    found = there(GENERATE.format(cases=cases, target=str(target), prompts=prompts))
    for drafter in ("ngram", "suffix", "composite"):
        assert found["counted"][drafter]["vllm:num_preemptions"] > 0
        assert found["texts"][drafter] == found["texts"]["plain"]
        assert found["counted"][drafter]["vllm:spec_decode_num_accepted_tokens"] > 50
        assert f'outrider:rows_total{{drafter="{drafter}",outcome="drafted"}}' in found["page"]
        assert f'outrider:texts_total{{drafter="{drafter}"}}' in found["page"]


@contextlib.contextmanager
def draft_service(address: str, log: Path) -> Iterator[None]:
    """`outrider service draft demo` at an address, ready."""
    command = [
        sys.executable,
        "-m",
        "outrider",
        "service",
        "draft",
        "demo",
        "--host",
        address,
        "--runtime",
        "eager",
    ]
    with (
        log.open("w") as lines,
        subprocess.Popen(command, stdout=lines, stderr=lines, cwd=REPOSITORY) as service,
    ):
        try:
            deadline = time.monotonic() + 120
            while "drafting for" not in log.read_text():
                assert service.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield
        finally:
            service.terminate()


def test_drafts_from_a_service(target: Path, tmp_path: Path) -> None:
    """A draft model in another process drafts for vLLM: the same texts, most drafts accepted."""
    prompts = word_problems(target, 4)
    address = f"unix:{tmp_path}/draft"
    cases: list[tuple[str, Any, Any]] = [
        ("plain", None, {}),
        ("remote", OURS, {"outrider": {"draft_endpoint": address}}),
    ]
    with draft_service(address, tmp_path / "service.log"):
        found = there(GENERATE.format(cases=cases, target=str(target), prompts=prompts))
    counted = found["counted"]["remote"]
    assert found["texts"]["remote"] == found["texts"]["plain"]
    assert (
        counted["vllm:spec_decode_num_accepted_tokens"]
        > 0.5 * counted["vllm:spec_decode_num_draft_tokens"]
        > 0
    )


def test_options_come_from_the_environment_too(target: Path) -> None:
    """And a drafter that cannot work there ends the start with our words."""
    script = (
        f"import vllm\ntry:\n    vllm.LLM(model={str(target)!r}, max_model_len=64, speculative_config={OURS})\n"
        "    answer = ''\nexcept Exception as error:\n    answer = str(error)"
    )
    assert "'recycling' needs the target's logits" in there(script, OUTRIDER_DRAFTER="recycling")


def test_the_new_runner_takes_a_speculator_of_this_shape(target: Path) -> None:
    """The new runner needs Triton, which has no CPU backend, so no text is made: vLLM's own base
    class, its signature, and a proposal on tensors shaped as its request states are."""
    script = """
import types, torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from outrider.integrations.vllm.speculator import Speculator, check_interface
check_interface()
vocabulary, context = 50, 40
config = types.SimpleNamespace(
    speculative_config=types.SimpleNamespace(num_speculative_tokens=4),
    model_config=types.SimpleNamespace(model="m", max_model_len=context, get_vocab_size=lambda: vocabulary, tokenizer="m",
                                       tokenizer_revision=None, trust_remote_code=False),
    parallel_config=types.SimpleNamespace(rank=0, tensor_parallel_size=1),
    scheduler_config=types.SimpleNamespace(max_num_seqs=4), additional_config={"outrider": {"drafter": "ngram"}})
buffer = lambda tensor: types.SimpleNamespace(gpu=tensor)
tokens = torch.zeros(4, context, dtype=torch.int32)
texts = {2: [1, 2, 3, 4, 1, 2], 0: [9, 8, 7, 9, 8], 3: [5, 6, 7]}
lengths = torch.zeros(4, dtype=torch.int32)
def write():
    for slot, text in texts.items():
        tokens[slot, :len(text)] = torch.tensor(text); lengths[slot] = len(text)
states = types.SimpleNamespace(all_token_ids=buffer(tokens), total_len=buffer(lengths))
speculator = Speculator(config, torch.device("cpu"), states)
def ask(order, counts, **more):
    write()
    batch = types.SimpleNamespace(num_reqs=len(order), idx_mapping=torch.tensor(order), req_ids=["r%d" % slot for slot in order])
    last = torch.tensor([[texts[slot][-1] if slot in texts else 0] for slot in range(4)])
    return speculator.propose(batch, {}, {}, None, None, torch.tensor(counts), None, last, None, None, None, **more).tolist()
answer = {"missing": [name for name in dir(NgramGPUSpeculator) if not name.startswith("_") and not hasattr(Speculator, name)],
          "abstract": sorted(Speculator.__abstractmethods__), "dummy": ask([2, 0], [1, 1], dummy_run=True)}
answer["first"] = ask([2, 0, 3], [1, 1, 0])
texts[2] += [3, 4, 9]
answer["second"] = ask([0, 2], [0, 3], num_speculative_tokens=2)
class Other(BaseSpeculator):
    def propose(self, input_batch): ...
try:
    check_interface(Other)
except Exception as error:
    answer["other"] = str(error)
"""
    found = there(script)
    assert found["missing"] == []
    assert found["abstract"] == []
    assert found["dummy"] == [[0] * 4] * 2
    # the third is still reading: filled with its last token
    assert found["first"] == [[3, 4, 1, 2], [7, 9, 8, 7], [7] * 4]
    assert found["second"] == [[8] * 4, [9] * 4]
    assert "Use the old runner" in found["other"]


def test_the_new_runner_is_offered_ours_only_when_asked(target: Path) -> None:
    """vLLM's own configuration: by itself it takes the old runner for us; set to take the new one,
    it no longer names custom_class as a reason against it. Other custom classes are refused as
    ever."""
    script = f"""
from vllm.engine.arg_utils import EngineArgs
from outrider.integrations.vllm import plugin
plugin.register()
def features(model):
    spec = {{**{OURS}, "model": model}}
    made = EngineArgs(model={str(target)!r}, max_model_len=64, speculative_config=spec).create_engine_config()
    return made._get_v2_model_runner_unsupported_features(), made.speculative_config.method
answer = []
for model in ("outrider.integrations.vllm.Proposer", "somebody.Else"):
    answer.append(features(model))
import os
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
plugin.register()
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
for model in ("outrider.integrations.vllm.Proposer", "somebody.Else"):
    answer.append(features(model))
import vllm.v1.worker.gpu.spec_decode as package
answer.append(hasattr(package.init_speculator, "_wrapped_by_outrider"))
"""
    before, other, after, other_after, wrapped = there(script)
    unsupported = ["speculative method 'custom_class'"]
    assert before == other == other_after == [unsupported, "custom_class"]
    assert after == [[], "custom_class"]
    assert wrapped


@pytest.mark.parametrize(
    "label",
    [
        "composite k=5 parts=suffix,ngram",
        "ngram-cache k=4",
        "retrieval k=5 branches=1 corpus=texts",
    ],
)
def test_what_tune_prints_is_read_by_vllm(target: Path, label: str) -> None:
    """Our drafter, its options and the table by batch size arrive where `Proposer` reads them."""
    advised = result(label, {label: 1.9}, schedule=[(8, "none", 0)], target=str(target))
    text = next(one.text for one in launch_lines(advised) if one.engine == "vLLM")
    speculative, additional = re.search(
        r"--speculative-config '(.*)' --additional-config '(.*)'$", text
    ).groups()
    script = f"""
import json
from vllm.engine.arg_utils import EngineArgs
made = EngineArgs(model={str(target)!r}, max_model_len=64, speculative_config=json.loads({speculative!r}),
                  additional_config=json.loads({additional!r})).create_engine_config()
spec = made.speculative_config
table = spec.num_speculative_tokens_per_batch_size
answer = [spec.method, spec.model, spec.num_speculative_tokens, table, made.additional_config]
"""
    method, model, size, table, options = there(script)
    assert (method, model) == (OURS["method"], OURS["model"])
    assert table == [[1, 7, size], [8, 4096, 0]]
    assert options["outrider"]["drafter"] == label.partition(" ")[0]


TENSOR_PARALLEL = """
import vllm
if __name__ == "__main__":
    texts = {{}}
    for name in ("plain", "suffix", "dice"):
        llm = vllm.LLM(
            model={target!r}, dtype="float32", max_model_len=256, max_num_seqs=4, enforce_eager=True, seed=0,
            tensor_parallel_size=2, num_gpu_blocks_override=20, disable_log_stats=False,
            speculative_config=None if name == "plain" else {ours}, additional_config={{"outrider": {{"drafter": name}}}},
        )
        params = vllm.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
        done = llm.generate([{{"prompt_token_ids": prompt}} for prompt in {prompts}], params, use_tqdm=False)
        texts[name] = [list(one.outputs[0].token_ids) for one in done]
        counted = {{m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}}
        texts[name + " accepted"] = counted.get("vllm:spec_decode_num_accepted_tokens")
        llm.llm_engine.engine_core.shutdown()
        del llm
    print("ANSWER " + json.dumps(texts))
"""
DICE = """
import os
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.trees.token_tree import TokenTree, to_draft

class Dice(NgramDrafter):
    repeatable = False

    def propose(self, rows, gamma):
        draft = super().propose(rows, gamma)
        return draft if os.urandom(1)[0] % 3 else to_draft([TokenTree() for _ in rows], rows.device)
"""


def test_two_ranks(target: Path, tmp_path: Path) -> None:
    """Each rank has its own suffix memory, and both draft the same; a drafter that draws lots
    drafts on the first rank alone. Ranks that part would hang, or say something else."""
    (tmp_path / "dice_drafter.py").write_text(DICE)
    info = tmp_path / "dice-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dice\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[outrider.drafters]\ndice = dice_drafter:Dice\n")
    script = tmp_path / "ranks.py"
    script.write_text(
        "import json"
        + TENSOR_PARALLEL.format(target=str(target), ours=OURS, prompts=word_problems(target, 4))
    )
    environment = {
        **os.environ,
        **SETTINGS,
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(tmp_path)]),
    }
    done = subprocess.run(
        [str(PYTHON), str(script)], env=environment, capture_output=True, text=True, timeout=600
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[-1].removeprefix("ANSWER "))
    for drafter in ("suffix", "dice"):
        assert found[drafter] == found["plain"]
        assert found[f"{drafter} accepted"] > 0


def test_the_page_of_a_real_server(target: Path, tmp_path: Path) -> None:
    """The server's process shows what the engine's counts, and as many accepted tokens as vLLM
    counts itself; its folder is gone when it has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(PYTHON),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(target),
        "--served-model-name",
        "demo",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "256",
        "--enforce-eager",
        "--num-gpu-blocks-override",
        "20",
        "--speculative-config",
        json.dumps(OURS),
        "--additional-config",
        json.dumps({"outrider": {"drafter": "composite"}}),
    ]
    environment = {
        **os.environ,
        **SETTINGS,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            command,
            env={**environment, "TMPDIR": str(tmp_path)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            waited = time.monotonic() + 600
            while not ask(port, "/health") and server.poll() is None and time.monotonic() < waited:
                time.sleep(0.5)
            question = {
                "model": "demo",
                "prompt": "Question: Sam has 37 lemons and James has 18 lemons. How many more "
                "lemons does Sam have?\nAnswer:",
                "max_tokens": 40,
                "temperature": 0,
            }
            answers = [json.loads(ask(port, "/v1/completions", question) or "{}") for _ in range(2)]
            assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
            page = ask(port, "/metrics") or ""
            assert list(tmp_path.glob("outrider-vllm-*"))
            server.send_signal(signal.SIGINT)
            server.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
    ours = re.findall(
        r'^outrider:accepted_tokens_total{drafter="composite",part="\w+"} (\S+)$', page, re.M
    )
    theirs = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total{.*} (\S+)$", page, re.M)
    assert sum(map(float, ours)) == float(theirs[0]) > 0
    assert 'outrider:texts_total{drafter="composite"} 2.0' in page
    assert not list(tmp_path.glob("outrider-vllm-*"))


def ask(port: int, path: str, content: dict[str, Any] | None = None) -> str | None:
    """What the server answers; None while it does not."""
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode()) or "ok"
    except (urllib.error.URLError, ConnectionError):
        return None
