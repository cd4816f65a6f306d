"""A script for the Python that has vLLM, so it imports nothing of ours: drafts there and writes
down what vLLM counted.

    python worker.py TASK.json ANSWER.json

TASK: target, dtype, max_model_len, max_tokens, threads, prompts (lists of token ids), speculative
(vLLM's `speculative_config`). ANSWER: {"versions", "counters", "tokens"}, or {"error"} when vLLM
refuses or fails; the traceback is on stderr.

Prompts run one at a time, greedily, to the last token, eagerly: nothing that could make the drafts
differ is left to chance. The engine runs in this very process: who ends it ends all of vLLM. It
ends by itself, with all that it started, at the end of its standard input, which whoever starts it
must keep open; so it does not outlive them, even if they are killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_num_"
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}


def draft(task: dict[str, Any]) -> dict[str, Any]:
    """ANSWER, where all goes well."""
    os.environ.update(SETTINGS)
    if task["threads"]:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{task['threads'] - 1}"
    # vLLM reads its settings when it is imported
    torch = import_module("torch")
    vllm = import_module("vllm")
    llm = vllm.LLM(
        model=task["target"],
        dtype=task["dtype"],
        max_model_len=task["max_model_len"],
        max_num_seqs=1,
        seed=0,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=task["speculative"],
    )
    greedy = vllm.SamplingParams(
        temperature=0.0, max_tokens=task["max_tokens"], ignore_eos=True, detokenize=False
    )
    tokens = []
    for prompt in task["prompts"]:
        done = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
        tokens.append(list(done.outputs[0].token_ids))
    return {
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "counters": counters(llm),
        "tokens": tokens,
    }


def counters(llm: Any) -> dict[str, Any]:
    """Drafts, draft tokens and accepted tokens since vLLM started; accepted ones by position, too."""
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith(PREFIX)}
    return {
        "drafts": found[f"{PREFIX}drafts"].value,
        "drafted": found[f"{PREFIX}draft_tokens"].value,
        "accepted": found[f"{PREFIX}accepted_tokens"].value,
        "accepted_per_position": list(found[f"{PREFIX}accepted_tokens_per_pos"].values),
    }


def main(task: Path, answer: Path) -> None:
    """Both files are JSON; the answer is written whole or not at all."""
    try:
        write(answer, draft(json.loads(task.read_text(encoding="utf-8"))))
    except Exception as error:
        write(answer, {"error": f"{type(error).__name__}: {error}"})
        raise


def end_with_input() -> None:
    """Soon after the other end of standard input is closed: by whoever holds it, or by the system
    when they are gone."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def write(path: Path, content: dict[str, Any]) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(content), encoding="utf-8")
    scratch.replace(path)


if __name__ == "__main__":
    del sys.path[0]  # this folder: vLLM's imports must not find our files
    end_with_input()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
