"""Worker: OpenVINO GenAI's `LLMPipeline`, plain or with its `draft_model`.

Settings: the checkpoint exported with optimum-intel to IR (weights as 16-bit floats, once, into the cache
folder), executed in bf16 on the CPU plugin (`INFERENCE_PRECISION_HINT=bf16`, LATENCY), a fixed number of
draft tokens, no prefix caching: the others read every prompt, too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import export_name, serve


class OpenVinoWorker:
    def load(self, command: dict[str, Any]) -> dict[str, Any]:
        cache = Path(command["cache"]) / "openvino"
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": command["threads"],
            "PERFORMANCE_HINT": "LATENCY",
        }
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.enable_prefix_caching = False
        options: dict[str, Any] = {**properties, "scheduler_config": scheduling}
        self._num_draft_tokens = None
        if command["draft"]:
            draft = exported(Path(command["draft"]), cache)
            options["draft_model"] = openvino_genai.draft_model(str(draft), "CPU", **properties)
            self._num_draft_tokens = command["num_draft_tokens"]
        self._pipe = openvino_genai.LLMPipeline(str(exported(Path(command["target"]), cache)), "CPU", **options)
        return {
            "versions": {"openvino_genai": openvino_genai.__version__, "openvino": openvino.__version__},
            "settings": {**properties, "weights": "16-bit IR", "prefix_caching": False},
        }

    def run(self, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._num_draft_tokens is not None:
            config.num_assistant_tokens = self._num_draft_tokens
        inputs = openvino.Tensor(np.array([prompt_ids], dtype=np.int64))
        result = self._pipe.generate(inputs, config)
        return {"token_ids": list(result.tokens[0]), "ttft_s": result.perf_metrics.get_ttft().mean / 1e3}


def exported(checkpoint: Path, cache: Path) -> Path:
    """The IR folder of a transformers checkpoint, exported once with optimum-intel's own command."""
    folder = cache / export_name(checkpoint)
    if not (folder / "openvino_model.xml").exists():
        command = ["export", "openvino", "--model", str(checkpoint), "--task", "text-generation-with-past"]
        cli = Path(sys.executable).with_name("optimum-cli")
        subprocess.run([str(cli), *command, "--weight-format", "fp16", str(folder)], check=True)
    return folder


if __name__ == "__main__":
    serve(OpenVinoWorker())
