"""Compiles grammars of strangers, in a process of its own that may hang, crash or run out of memory
without harm.

Run by trial.py as a script, not imported: it needs llguidance and nothing of outrider, so it starts
in a fraction of a second. The first line of its input is a JSON object with the limits and the
vocabulary's special tokens; each line after it is a JSON object with a grammar, answered by a line
with what is wrong with it.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Any

import llguidance


class _Vocabulary:
    """All bytes, and the special tokens that grammars may name: what compiling depends on."""

    def __init__(self, special: list[str], num_tokens: int) -> None:
        named = [bytes.fromhex(token) for token in special]
        self.tokens = [bytes([value]) for value in range(256)] + named
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = 256 if named else 0
        self.bos_token_id = None
        self.num_tokens = max(num_tokens, len(self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def serve(facts: dict[str, Any]) -> None:
    """Answer line by line until the input ends."""
    vocabulary = _Vocabulary(facts["special"], facts["num_tokens"])
    index = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(vocabulary),
        n_vocab=vocabulary.num_tokens,
        eos_token=vocabulary.eos_token_id,
        slices=[],
    )
    limits = llguidance.LLParserLimits(**facts["limits"])
    for message in sys.stdin:
        asked = json.loads(message)
        _allow(facts["seconds"])
        problem = llguidance.LLMatcher.validate_grammar(asked["grammar"], index, limits=limits)
        if not problem and asked["compile"]:
            matcher = llguidance.LLMatcher(index, asked["compile"], log_level=0, limits=limits)
            matcher.compute_logit_bias()
        _allow(0)
        print(json.dumps({"problem": problem}), flush=True)


def _allow(seconds: float) -> None:
    """Let the system end this process once it has used up `seconds` of a processor; 0: no end."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _bound_memory(mebibytes: int) -> None:
    """Let allocations fail, which ends this process, once it has taken `mebibytes` more than now.
    On Linux."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    most = taken + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Read the facts, then serve in a thread whose stack is as small as the limits say."""
    facts = json.loads(sys.stdin.readline())
    threading.stack_size(facts["stack_mib"] << 20)
    worker = threading.Thread(target=serve, args=(facts,))
    _bound_memory(facts["memory_mib"])
    worker.start()
    worker.join()


if __name__ == "__main__":
    main()
