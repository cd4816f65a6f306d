"""Worker: Outrider, drafter "none" or "draft-model". Settings: bf16 as the checkpoint has it, native runtime, block
verifier.
"""

from __future__ import annotations

from typing import Any

from protocol import serve

from outrider import LLM, SamplingParams


class OutriderWorker:
    def load(self, command: dict[str, Any]) -> dict[str, Any]:
        drafting: dict[str, Any] = {"drafter": "none"}
        if command["draft"]:
            length = command["num_draft_tokens"]
            drafting = {"drafter": "draft-model", "draft": command["draft"], "num_draft_tokens": length}
        self._llm = LLM(
            command["target"], **drafting, dtype="bfloat16", threads=command["threads"],
            runtime=command["runtime"], max_model_len=command["max_model_len"], max_num_seqs=1,
        )  # fmt: skip
        settings = {name: self._llm.config[name] for name in ("dtype", "runtime", "verifier", "exact")}
        return {"versions": self._llm.versions, "settings": settings}

    def run(self, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        done = self._llm.generate([prompt_ids], params)[0]
        return {"token_ids": done.token_ids, "ttft_s": done.stats.ttft_s, "stats": done.stats.as_dict()}


if __name__ == "__main__":
    serve(OutriderWorker())
