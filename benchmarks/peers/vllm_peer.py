"""Worker: vLLM's CPU build, plain, with `speculative_config={"method": "draft_model"}`, or with the
one it is given.

Settings: bf16, its own default compilation, engine in this process (no worker process to talk to),
prefix caching off (a prompt is used once per round, and a cached prompt would flatter the later
rounds), one sequence, 1 GiB of KV.
"""

from __future__ import annotations

import os
from typing import Any

from protocol import serve

COUNTED = "vllm:spec_decode_num_"
ITERATIONS = "vllm:iteration_tokens_total"  # a histogram: its count is the engine's passes


class VllmWorker:
    def load(self, command: dict[str, Any]) -> dict[str, Any]:
        threads = command["threads"]
        os.environ.update(
            HF_HUB_OFFLINE="1",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
            VLLM_NO_USAGE_STATS="1",
            VLLM_DO_NOT_TRACK="1",
        )
        import torch
        import vllm

        speculative = command.get("speculative")
        if command.get("draft"):
            speculative = {
                "method": "draft_model",
                "model": command["draft"],
                "num_speculative_tokens": command["num_draft_tokens"],
            }
        self._llm = vllm.LLM(
            model=command["target"],
            dtype="bfloat16",
            max_model_len=command["max_model_len"],
            max_num_seqs=1,
            enable_prefix_caching=False,
            speculative_config=speculative,
            disable_log_stats=False,
            seed=0,
            additional_config=command.get("additional_config") or {},
            num_gpu_blocks_override=command.get("kv_blocks"),
        )
        self._sampling_params = vllm.SamplingParams
        return {
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "settings": {
                "dtype": "bfloat16",
                "compiled": True,
                "prefix_caching": False,
                "max_num_seqs": 1,
            },
        }

    def run(self, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        params = self._sampling_params(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        output = self._llm.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)[0]
        metrics = output.metrics
        return {
            "token_ids": list(output.outputs[0].token_ids),
            "ttft_s": metrics.first_token_latency if metrics is not None else None,
            "counters": self._counters(),
        }

    def _counters(self) -> dict[str, Any]:
        """What vLLM has counted since it started: its passes, and speculation; accepted tokens by
        position, too."""
        counted: dict[str, Any] = {}
        for metric in self._llm.get_metrics():
            if metric.name.startswith(COUNTED):
                name = metric.name.removeprefix(COUNTED)
                counted[name] = list(metric.values) if hasattr(metric, "values") else metric.value
            elif metric.name == ITERATIONS:
                counted["iterations"] = metric.count
        return counted


if __name__ == "__main__":
    serve(VllmWorker())
