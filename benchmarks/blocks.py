"""A GGUF file beside a bf16 folder of the same model: seconds to load, tokens/s of plain greedy
decoding, memory.

    python benchmarks/blocks.py FILE.gguf FOLDER [--runtime eager|auto|on] [--max-tokens N]

Each model loads in a process of its own; runs take turns, and the fastest of `--repeats` counts,
because a machine is only ever slowed down by others.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

PROMPT = "The history of the lighthouse begins with"


def measure(name: str, runtime: Any, max_tokens: int, repeats: int) -> dict[str, float]:
    """One model in this process: seconds to load, best tokens/s, peak memory in MiB."""
    from outrider import LLM, SamplingParams

    start = time.perf_counter()
    busy = time.process_time()
    llm = LLM(name, drafter="none", runtime=runtime)
    load = time.perf_counter() - start
    load_cpu = time.process_time() - busy
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        done = llm.generate(PROMPT, params)[0]
        best = max(best, len(done.token_ids) / (time.perf_counter() - start))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"load_s": load, "load_cpu_s": load_cpu, "tokens_per_s": best, "peak_mib": peak}


def main() -> None:
    """Measure every model named, in turn, and print a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--runtime", default="auto", choices=("auto", "native", "eager"))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.models[0], given.runtime, given.max_tokens, given.repeats)))
        return
    options = [
        "--runtime",
        given.runtime,
        "--max-tokens",
        str(given.max_tokens),
        "--repeats",
        str(given.repeats),
    ]
    for name in given.models:
        done = subprocess.run(
            [sys.executable, __file__, name, *options, "--one"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in found.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
