"""Worker: Outrider with any of its drafters, block verifier where the draft is a chain.

Settings: bf16 unless `dtype` says otherwise (a GGUF file's weights stay in their blocks), native
runtime unless `runtime` does, one row at a time. `use` takes the lab's text form of a
configuration: "suffix k=8".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from protocol import serve

from outrider import LLM, SamplingParams
from outrider.build import Needs, Options, assemble, choose, load_models
from outrider.configuration import Configuration
from outrider.engine.warmup import calibrate_alone
from outrider.parts import Parts


class OutriderWorker:
    def load(self, command: dict[str, Any]) -> dict[str, Any]:
        """`draft` and `num_draft_tokens` say how it is decoded; with `draftings`, all that `use`
        may ask for later."""
        drafting: dict[str, Any] = {"drafter": "none"}
        if command["draft"]:
            length = command["num_draft_tokens"]
            drafting = {
                "drafter": "draft-model",
                "draft": command["draft"],
                "num_draft_tokens": length,
            }
        self._options, parts = choose(
            Options(
                command["target"],
                **drafting,
                dtype=command.get("dtype", "bfloat16"),
                runtime=command["runtime"],
                threads=command["threads"],
                max_model_len=command["max_model_len"],
                max_num_seqs=1,
            )
        )
        later = [Configuration.parse(text).parts() for text in command.get("draftings", [])]
        needs = Needs.of_all([parts, *later]) if later else Needs.of(parts)
        self._models = load_models(self._options, needs)
        self._ways: dict[str, LLM] = {}
        self._llm = self._decoding_with(parts)
        return {"versions": self._llm.versions, "settings": self._settings()}

    def use(self, drafting: str, *, fresh: bool) -> dict[str, Any]:
        """Ways of drafting take turns on the loaded models; a fresh one has seen no text and
        measured nothing."""
        if fresh and drafting in self._ways:
            self._ways.pop(drafting).close()
        if drafting not in self._ways:
            wanted = Configuration.parse(drafting)
            chosen = replace(
                self._options,
                drafter=wanted.drafter,
                draft=None,
                num_draft_tokens=wanted.num_draft_tokens,
                drafter_options=wanted.drafter_options,
                verifier=wanted.verifier,
                verifier_options=wanted.verifier_options,
            )
            self._ways[drafting] = self._decoding_with(choose(chosen)[1])
        self._llm = self._ways[drafting]
        return {"settings": self._settings()}

    def passes(self, contexts: list[int], widths: list[int], repeats: int) -> list[list[float]]:
        """Single passes of the target, as `runtime.py` times them."""
        from runtime import passes_s

        with torch.inference_mode():
            found = passes_s(self._models.target.lm, contexts, repeats, widths)
        return [[found[context][width] for width in widths] for context in contexts]

    def _decoding_with(self, parts: Parts) -> LLM:
        built = assemble(self._models, parts)
        calibrate_alone(built, built.decoder, parts)
        return LLM.around(built)

    def _settings(self) -> dict[str, Any]:
        config = self._llm.config
        named = {name: config[name] for name in ("dtype", "runtime", "verifier", "exact")}
        return {**named, "notes": self._llm.notes}

    def run(
        self, prompt_ids: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> dict[str, Any]:
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True
        )
        done = self._llm.generate([prompt_ids], params)[0]
        return {
            "token_ids": done.token_ids,
            "ttft_s": done.stats.ttft_s,
            "stats": done.stats.as_dict(),
        }


if __name__ == "__main__":
    serve(OutriderWorker())
