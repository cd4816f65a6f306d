"""Worker: llama.cpp through llama-cpp-python, plain or with a draft model behind its
`LlamaDraftModel` class.

Settings: bf16 GGUF written from the same checkpoint, or a GGUF file as it is; compiled here for
this processor, fp16 KV (its default), no flash attention (its default). llama.cpp's own speculative
loop is a C++ program that the Python package does not carry; the package's loop calls a Python
class for drafts, so the draft model runs one llama.cpp pass per token. `use`: "plain", or "lookup
k=10 ngram=2", which is the package's prompt look-up.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf_export import exported
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from protocol import Stopwatch, named_numbers, serve


class GreedyDraft(LlamaDraftModel):
    """Drafts `length` tokens greedily; keeps the part of its KV that still agrees with the text."""

    def __init__(self, model: llama_cpp.Llama, length: int) -> None:
        self._model = model
        self._length = length

    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        model = self._model
        cached = min(model.n_tokens, len(input_ids) - 1)
        differs = np.nonzero(model.input_ids[:cached] != input_ids[:cached])[0]
        # eval forgets everything after it
        model.n_tokens = int(differs[0]) if len(differs) else cached
        feed = input_ids[model.n_tokens :].tolist()
        drafted = []
        for _ in range(self._length):
            model.eval(feed)
            logits = np.ctypeslib.as_array(model._ctx.get_logits(), shape=(model.n_vocab(),))
            feed = [int(logits.argmax())]
            drafted += feed
        return np.array(drafted, dtype=np.intc)


class LlamaCppWorker:
    def load(self, command: dict[str, Any]) -> dict[str, Any]:
        cache = Path(command["cache"]) / "gguf"
        target = Path(command["target"])
        self._options = {
            "n_ctx": command["max_model_len"],
            "n_threads": command["threads"],
            "n_threads_batch": command["threads"],
            "use_mmap": False,
            "verbose": False,
        }
        self._path = target if target.suffix == ".gguf" else exported(target, cache)
        draft = None
        if command["draft"]:
            model = llama_cpp.Llama(str(exported(Path(command["draft"]), cache)), **self._options)
            draft = GreedyDraft(model, command["num_draft_tokens"])
        self._llm = self._opened(draft)
        self._ways = {"plain": self._llm}
        return {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "settings": {
                "weights": "the file's" if target.suffix == ".gguf" else "bf16 GGUF",
                "kv": "f16",
                "draft_loop": "Python class" if draft else None,
            },
        }

    def _opened(self, draft: LlamaDraftModel | None) -> llama_cpp.Llama:
        """A draft is named when a model is opened, since it needs the logits of all tokens of a
        pass."""
        return llama_cpp.Llama(
            str(self._path), draft_model=draft, logits_all=draft is not None, **self._options
        )

    def use(self, drafting: str, *, fresh: bool) -> dict[str, Any]:
        """Its look-up knows nothing but the text before it, so `fresh` changes nothing."""
        if drafting not in self._ways:
            numbers = named_numbers(drafting, "lookup", k=10, ngram=2)
            self._ways[drafting] = self._opened(
                LlamaPromptLookupDecoding(
                    max_ngram_size=numbers["ngram"], num_pred_tokens=numbers["k"]
                )
            )
        self._llm = self._ways[drafting]
        return {
            "settings": {"draft_loop": None if drafting == "plain" else "LlamaPromptLookupDecoding"}
        }

    def passes(self, contexts: list[int], widths: list[int], repeats: int) -> list[list[float]]:
        """llama_decode with the logits of all its tokens, as a pass that checks drafts needs them."""
        model = self._llm
        context, batch = model._ctx, model._batch
        tokens = [1 + number % 997 for number in range(max(contexts) + max(widths))]
        found = []
        for length in contexts:
            model.reset()
            context.kv_cache_seq_rm(-1, 0, -1)
            model.eval(tokens[:length])
            row = dict.fromkeys(widths, float("inf"))
            for _ in range(repeats):
                for width in widths:
                    context.kv_cache_seq_rm(-1, length, -1)
                    batch.set_batch(
                        batch=tokens[length : length + width], n_past=length, logits_all=True
                    )
                    start = time.perf_counter()
                    context.decode(batch)
                    context.get_logits()  # waits for them
                    row[width] = min(row[width], time.perf_counter() - start)
            found.append([row[width] for width in widths])
        model.reset()
        return found

    def run(self, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        self._llm.reset()  # no prefix reuse between requests
        watch = Stopwatch()
        token_ids = []
        for token in self._llm.generate(prompt_ids, temp=0.0):
            watch.mark()
            token_ids.append(int(token))
            if len(token_ids) == max_tokens:
                break
        return {"token_ids": token_ids, "ttft_s": watch.first_s}


if __name__ == "__main__":
    serve(LlamaCppWorker())
