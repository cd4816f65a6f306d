"""Faults put in on purpose, one at a time, in a copy of the tree: do the fast tests notice?

    python -m tools.mutants                      all of tools/mutants.toml, half an hour; `make mutants` is this
    python -m tools.mutants "top-k" "holm"       those with such names alone, nothing stored
    python -m tools.mutants --render benchmarks/results/mutants-DATE.json

A fault is found when one of its tests fails with it, within LIMIT_S, and the same test passes
without it. Tests that take too long have not found anything. Less than SHARE found, or an entry
whose text is no longer in its file exactly once, is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from outrider.machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "mutants.toml"
RESULTS = ROOT / "benchmarks" / "results"
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "site")
LIMIT_S = 90  # for the tests of one fault
SHARE = 0.95  # of the faults that must be found
FAST = "not slow and not nightly and not gpu"
FAILED = 1  # pytest's exit status
# others: nothing was run, or not even imported
WITHOUT_FAILURES = {0: "survived", None: "took too long"}
PYTEST_OPTIONS = ("-x", "-q", "-o", "cache_dir=.pytest_cache", "-m", FAST)


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, `old` becomes `new`; some test in `tests` should fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def mutated(self, root: Path) -> str:
        """The file's text with the fault. Raises ValueError where `old` does not occur in it
        exactly once."""
        text = (root / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"mutant '{self.name}': its old text occurs {count} times in {self.file}, "
                "expected once: renew it"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What the tests said of one fault."""

    name: str
    file: str
    # "found", "survived", "took too long", "not run", or "broken test": one that fails without the
    # fault, too
    verdict: str
    found_by: str  # the test that failed, or nothing
    seconds: float


def read_mutants() -> list[Mutant]:
    """The table of faults."""
    return [Mutant(**entry) for entry in tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]]


def try_mutant(mutant: Mutant, copy: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Put the fault into a copy of the tree, run its tests, take the fault out again."""
    path = copy / mutant.file
    before = path.read_text(encoding="utf-8")
    shutil.rmtree(copy / ".pytest_cache", ignore_errors=True)
    began = time.monotonic()
    try:
        replace_source(path, mutant.mutated(copy))
        status = run_tests(mutant.tests, copy, limit_s)
    finally:
        replace_source(path, before)
    seconds = round(time.monotonic() - began, 1)
    if status != FAILED:
        return Outcome(
            mutant.name, mutant.file, WITHOUT_FAILURES.get(status, "not run"), "", seconds
        )
    failed = json.loads(
        (copy / ".pytest_cache" / "v" / "cache" / "lastfailed").read_text(encoding="utf-8")
    )
    passes = run_tests(["--last-failed", *mutant.tests], copy, limit_s) == 0
    return Outcome(
        mutant.name, mutant.file, "found" if passes else "broken test", next(iter(failed)), seconds
    )


def replace_source(path: Path, text: str) -> None:
    """Write a source file, and forget what Python compiled of it: one of the same size and second
    would pass for up to date."""
    path.write_text(text, encoding="utf-8")
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(arguments: Sequence[str], copy: Path, limit_s: float) -> int | None:
    """Pytest's exit status in the copy; None where it ran out of time."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "OUTRIDER_SHARED": os.environ.get("OUTRIDER_SHARED", str(ROOT.parent / "shared")),
        # of this fault alone
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".pytest_cache" / "hypothesis"),
    }
    command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, *arguments]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever tests with a fault left running
        process.wait()


def summary(outcomes: Sequence[Outcome]) -> str:
    """The score, then what was not found."""
    num_found = sum(outcome.verdict == "found" for outcome in outcomes)
    lines = [f"{num_found} of {len(outcomes)} faults found ({num_found / len(outcomes):.1%})"]
    lines += [
        f"{outcome.verdict}: {outcome.name} ({outcome.file})"
        for outcome in outcomes
        if outcome.verdict != "found"
    ]
    return "\n".join(lines)


def table(outcomes: Sequence[Outcome]) -> str:
    """Faults and those found by part of the package, for the page of results."""
    parts = [
        outcome.file.split("/")[1] + "/" * (outcome.file.count("/") > 1) for outcome in outcomes
    ]
    faults = Counter(parts)
    noticed = Counter(
        part for part, outcome in zip(parts, outcomes, strict=True) if outcome.verdict == "found"
    )
    lines = [f"| `{part}` | {count} | {noticed[part]} |" for part, count in sorted(faults.items())]
    return "\n".join(["| part | faults | found |", "|---|---:|---:|", *lines])


def is_enough(outcomes: Sequence[Outcome]) -> bool:
    """Whether as many were found as must be."""
    return sum(outcome.verdict == "found" for outcome in outcomes) >= SHARE * len(outcomes)


def store(outcomes: Sequence[Outcome]) -> Path:
    """Write the result of a whole run, over one of the same day."""
    today = datetime.now(UTC).date().isoformat()
    head = {
        "version": 1,
        "benchmark": "mutants",
        "date": today,
        "command": "python -m tools.mutants",
    }
    content: dict[str, Any] = {
        **head,
        "hardware": describe_machine(),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    path = RESULTS / f"mutants-{today}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> list[Outcome]:
    """The outcomes of a stored result."""
    return [
        Outcome(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))["outcomes"]
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="parts of the names of faults; none: all of them")
    parser.add_argument("--render", type=Path, metavar="FILE", help="show a stored result")
    asked = parser.parse_args()
    if asked.render is not None:
        print(summary(read(asked.render)), table(read(asked.render)), sep="\n\n")
        return
    mutants = read_mutants()
    chosen = [
        mutant
        for mutant in mutants
        if not asked.names or any(name in mutant.name for name in asked.names)
    ]
    if not chosen:
        parser.error(
            f"no fault has a name with {' or '.join(asked.names)} in it; {TABLE.name} lists them"
        )
    try:
        for mutant in chosen:
            mutant.mutated(ROOT)
    except ValueError as error:
        parser.error(str(error))
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="outrider-mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        for mutant in chosen:
            outcomes.append(try_mutant(mutant, copy))
            print(
                f"{outcomes[-1].verdict:14} {outcomes[-1].seconds:5.1f} s  {mutant.name}  "
                f"{outcomes[-1].found_by}",
                flush=True,
            )
    print(summary(outcomes))
    if not asked.names:
        print(f"stored in {store(outcomes).relative_to(ROOT)}")
    sys.exit(0 if is_enough(outcomes) else 1)


if __name__ == "__main__":
    main()
