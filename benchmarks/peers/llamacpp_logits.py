"""llama.cpp's scores along given texts, for `fidelity.py`: one fp32 array (T, V) a text, in files.

python llamacpp_logits.py MODEL.gguf TOKENS.json OUT THREADS      OUT/0.npy, OUT/1.npy, ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama


def main(model: str, tokens: str, out: str, threads: str) -> None:
    """Feed every text from an empty cache."""
    texts = json.loads(Path(tokens).read_text(encoding="utf-8"))
    longest = max(map(len, texts))
    pools = {"n_threads": int(threads), "n_threads_batch": int(threads)}
    engine = Llama(model, n_ctx=longest, n_batch=longest, logits_all=True, verbose=False, **pools)
    for number, text in enumerate(texts):
        engine.reset()
        engine.eval(text)
        np.save(
            Path(out) / f"{number}.npy", np.asarray(engine.scores[: len(text)], dtype=np.float32)
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
