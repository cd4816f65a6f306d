"""Our drafters in a real vLLM, where one is installed (OUTRIDER_VLLM_PYTHON, or .peers/vllm of benchmarks/setup_peers.sh)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from outrider.demo import demo_paths
from outrider.lab.tune.export import vllm as advice
from outrider.lab.workload.load import load_workload

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("OUTRIDER_VLLM_PYTHON", REPOSITORY / ".peers" / "vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM here (OUTRIDER_VLLM_PYTHON, benchmarks/setup_peers.sh)"),
]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip
OURS = {"method": "custom_class", "model": "outrider.integrations.vllm.Proposer", "num_speculative_tokens": 5}


def there(script: str, timeout_s: float = 600, **environment: str) -> Any:
    """What a script in vLLM's Python leaves in `answer`, by JSON."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    path = os.pathsep.join([str(REPOSITORY)])
    done = subprocess.run(
        [str(PYTHON), "-c", f"import json\n{script}\nprint('\\nANSWER ' + json.dumps(answer))"],
        env={**kept, **SETTINGS, "PYTHONPATH": path, **environment}, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
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
    return [tokenizer("\n".join(texts[: 1 + n % 3] + texts[n : n + 1])).input_ids for n in range(count)]


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
    """Ten prompts in a batch of three, chunked prefill (64 tokens a step), prefix caching, and too few pages for all, so that
    requests are preempted: the text is vLLM's own, and drafts were accepted. vLLM's page shows our counters."""
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


def test_options_come_from_the_environment_too(target: Path) -> None:
    """And a drafter that cannot work there ends the start with our words."""
    script = (
        f"import vllm\ntry:\n    vllm.LLM(model={str(target)!r}, max_model_len=64, speculative_config={OURS})\n"
        "    answer = ''\nexcept Exception as error:\n    answer = str(error)"
    )
    assert "'recycling' needs the target's logits" in there(script, OUTRIDER_DRAFTER="recycling")


def test_the_new_runner_takes_a_speculator_of_this_shape(target: Path) -> None:
    """The new runner needs Triton, which has no CPU backend, so no text is made: vLLM's own base class, its signature, and a
    proposal on tensors shaped as its request states are."""
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
    assert found["first"] == [[3, 4, 1, 2], [7, 9, 8, 7], [7] * 4]  # the third is still reading: filled with its last token
    assert found["second"] == [[8] * 4, [9] * 4]
    assert "Use the old runner" in found["other"]


def test_the_new_runner_is_offered_ours_only_when_asked(target: Path) -> None:
    """vLLM's own configuration: by itself it takes the old runner for us; told to take the new one, it no longer names
    custom_class as a reason against it. Other custom classes are refused as ever."""
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
    assert OURS["model"] == advice.PROPOSER
