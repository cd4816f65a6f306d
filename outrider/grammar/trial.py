"""Grammars of strangers are compiled in another process first: one that dies there is refused.

llguidance bounds what a lexer may cost, but not all work before that: a schema with two dozen
patterns compiles for minutes, and a chain of some thousand rules overflows the stack, which ends
the process. What compiles there within the limits of limits.py is compiled again here, at about the
same cost.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from outrider.errors import RequestError
from outrider.grammar.limits import COMPILE_MIB, COMPILE_S, PARSER, STACK_MIB

MAX_PROCESSES = 4  # at once; a grammar that hangs holds one of them for COMPILE_S
# times COMPILE_S until a process is ended that got no processor, or whose system cannot count its
# time
PATIENCE = 10.0
SCRIPT = Path(__file__).with_name("trial_process.py")


class Trial:
    """Says what is wrong with a grammar, or that it takes too much. Thread-safe. A process is
    started when there is work; one of them waits for more, and ends with this process."""

    def __init__(self, index: Any) -> None:
        """`index`: the vocabulary, as vocabulary.py makes it."""
        special = [token for token in range(index.vocab_size) if index.is_special_token(token)]
        facts = {
            "special": [index.decode_bytes([token]).hex() for token in special],
            "num_tokens": index.vocab_size,
            "limits": PARSER,
            "seconds": COMPILE_S,
            "memory_mib": COMPILE_MIB,
            "stack_mib": STACK_MIB,
        }
        self._facts = json.dumps(facts)  # what a new process reads first
        self._room = threading.Semaphore(MAX_PROCESSES)
        self._lock = threading.Lock()
        self._idle: subprocess.Popen[str] | None = None

    def problem(self, grammar: str, compiled: str, name: str) -> str:
        """llguidance's complaint about `grammar`, "" if it has none; then `compiled`, unless it is
        "", was compiled as well.

        Raises RequestError that begins with `name` where that takes too much time, memory or stack.
        """
        with self._room:
            process = self._taken()
            answer = self._answer(process, json.dumps({"grammar": grammar, "compile": compiled}))
            if not answer:
                raise RequestError(f"{name} {_excess(process.wait())}")
            self._give_back(process)
            return str(json.loads(answer)["problem"])

    def _taken(self) -> subprocess.Popen[str]:
        """The idle process, or a new one."""
        with self._lock:
            process = self._idle
            self._idle = None
        if process is not None and process.poll() is None:
            return process
        process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        assert process.stdin is not None
        process.stdin.write(self._facts + "\n")
        return process

    def _answer(self, process: subprocess.Popen[str], line: str) -> str:
        """The process's answer to one line; "" from a process that ends."""
        assert process.stdin is not None
        assert process.stdout is not None
        alarm = threading.Timer(PATIENCE * COMPILE_S, process.kill)
        alarm.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        except BrokenPipeError:
            return ""
        finally:
            alarm.cancel()

    def _give_back(self, process: subprocess.Popen[str]) -> None:
        """Keep one process for the next grammar, and let a second one end."""
        with self._lock:
            spare = self._idle
            self._idle = process
        if spare is not None:
            spare.communicate()


def _excess(status: int) -> str:
    """Which limit ended a process."""
    if status in (-getattr(signal, "SIGPROF", 0), -getattr(signal, "SIGKILL", 0)):
        return f"takes more than {COMPILE_S:g} s to compile: make it smaller, or combine fewer patterns"
    if status == -getattr(signal, "SIGABRT", 0):
        return (
            f"takes more than {COMPILE_MIB} MiB to compile: make it smaller, or let it repeat less"
        )
    if status in (-getattr(signal, "SIGSEGV", 0), -getattr(signal, "SIGBUS", 0)):
        return f"cannot be compiled in {STACK_MIB} MiB of stack: its rules lead into one another too deeply"
    return f"cannot be compiled: the process that tried ended with status {status}"
