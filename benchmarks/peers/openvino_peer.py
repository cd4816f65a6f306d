"""Worker: OpenVINO GenAI's `LLMPipeline`, plain, with its `draft_model`, or with its prompt
look-up.

Settings: the checkpoint exported with optimum-intel to IR (weights as 16-bit floats or in the
`format` that is asked for, once, into the cache folder), executed in bf16 on the CPU plugin
(`INFERENCE_PRECISION_HINT=bf16`, LATENCY), a fixed number of draft tokens, no prefix caching: the
others read every prompt, too. `use`: "plain", or "lookup k=5 ngram=3".
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import export_name, named_numbers, serve

FORMATS = {  # weights -> what optimum-intel is given
    "fp16": ["--weight-format", "fp16"],
    "int8": ["--weight-format", "int8"],
    # groups that widths of 576 are made of
    "int4": ["--weight-format", "int4", "--ratio", "1.0", "--group-size", "64"],
}


class OpenVinoWorker:
    def load(self, command: dict[str, Any]) -> dict[str, Any]:
        cache = Path(command["cache"]) / "openvino"
        form = command.get("format", "fp16")
        self._properties = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": command["threads"],
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._folder = exported(Path(command["target"]), cache, form)
        options: dict[str, Any] = {}
        self._lengths: dict[str, int] = {}
        if command["draft"]:
            draft = exported(Path(command["draft"]), cache, "fp16")
            options["draft_model"] = openvino_genai.draft_model(
                str(draft), "CPU", **self._properties
            )
            self._lengths = {"num_assistant_tokens": command["num_draft_tokens"]}
        self._pipe = self._opened(**options)
        self._ways = {"plain": (self._pipe, self._lengths)}
        return {
            "versions": {
                "openvino_genai": openvino_genai.__version__,
                "openvino": openvino.__version__,
            },
            "settings": {**self._properties, "weights": f"{form} IR", "prefix_caching": False},
        }

    def _opened(self, **options: Any) -> Any:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.enable_prefix_caching = False
        return openvino_genai.LLMPipeline(
            str(self._folder), "CPU", scheduler_config=scheduling, **self._properties, **options
        )

    def use(self, drafting: str, *, fresh: bool) -> dict[str, Any]:
        """Its look-up knows nothing but the text before it, so `fresh` changes nothing."""
        if drafting not in self._ways:
            numbers = named_numbers(drafting, "lookup", k=5, ngram=3)
            lengths = {"num_assistant_tokens": numbers["k"], "max_ngram_size": numbers["ngram"]}
            self._ways[drafting] = self._opened(prompt_lookup=True), lengths
        self._pipe, self._lengths = self._ways[drafting]
        return {"settings": {"prompt_lookup": drafting != "plain"}}

    def run(self, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        for name, value in self._lengths.items():
            setattr(config, name, value)
        inputs = openvino.Tensor(np.array([prompt_ids], dtype=np.int64))
        result = self._pipe.generate(inputs, config)
        return {
            "token_ids": list(result.tokens[0]),
            "ttft_s": result.perf_metrics.get_ttft().mean / 1e3,
        }


def exported(checkpoint: Path, cache: Path, form: str) -> Path:
    """The IR folder of a transformers checkpoint, exported once with optimum-intel's own command."""
    folder = cache / (export_name(checkpoint) + ("" if form == "fp16" else f"-{form}"))
    if not (folder / "openvino_model.xml").exists():
        command = [
            "export",
            "openvino",
            "--model",
            str(checkpoint),
            "--task",
            "text-generation-with-past",
        ]
        cli = Path(sys.executable).with_name("optimum-cli")
        subprocess.run([str(cli), *command, *FORMATS[form], str(folder)], check=True)
    return folder


if __name__ == "__main__":
    serve(OpenVinoWorker())
