"""Worker: Hugging Face transformers, `generate` and assisted generation (`assistant_model`).

Settings: bf16, sdpa attention, dynamic cache, eager (its default on CPU: generate compiles only
static caches on accelerators). The draft length is held constant
(`num_assistant_tokens_schedule="constant"`) and the confidence threshold that would shorten drafts
is off, so that k means what it means in the other engines.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from protocol import Stopwatch, serve
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """Notes when the first generated token arrives; the prompt is put first."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts > 1:
            self.watch.mark()

    def end(self) -> None:
        """Nothing to flush."""


class TransformersWorker:
    def load(self, command: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(command["threads"])
        self._target = self._model(command["target"])
        self._draft = self._model(command["draft"]) if command["draft"] else None
        if self._draft is not None:
            assistant = self._draft.generation_config
            assistant.num_assistant_tokens = command["num_draft_tokens"]
            assistant.num_assistant_tokens_schedule = "constant"
            assistant.assistant_confidence_threshold = 0.0
        return {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "settings": {
                "dtype": "bfloat16",
                "attention": "sdpa",
                "compiled": False,
                "schedule": "constant",
            },
        }

    def _model(self, folder: str) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.generation_config.eos_token_id = None  # exactly max_tokens tokens
        return model.eval()

    @torch.inference_mode()
    def run(self, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        inputs = torch.tensor([prompt_ids])
        streamer = FirstToken()
        output = self._target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            streamer=streamer,
            assistant_model=self._draft,
        )
        return {
            "token_ids": output[0, len(prompt_ids) :].tolist(),
            "ttft_s": streamer.watch.first_s,
        }


if __name__ == "__main__":
    serve(TransformersWorker())
