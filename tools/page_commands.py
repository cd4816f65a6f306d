"""Runs the commands of README and the tour as a reader would, in an environment with exactly the
extras that a page names.

    python -m tools.page_commands --torch torch==2.13.0        `make pages` is this, with the Makefile's pin

Every line of a `sh` block and every `python` block of PAGES is run, a new one without a change
here. Models and files that a reader has get stand-ins, commands that measure for minutes small
limits; what cannot run is in SKIPPED, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/tour.md")
STAND_INS = {  # what a page says -> what is here
    "make demo": "outrider demo",  # in the environment that `make demo` makes
    "HuggingFaceTB/SmolLM2-135M-Instruct": "demo",  # hub models need a network
    "Qwen/Qwen2.5-7B-Instruct": "demo",
    "Qwen/Qwen2.5-0.5B-Instruct": "demo",
    "MODEL": "demo",
}
MADE = {"make demo": frozenset({"lab"})}  # extras that the Makefile installs
UNRELEASED = "no package index has a release yet"
SKIPPED = {
    "make test": "continuous integration runs the tests itself",
    "uvx --from outrider outrider chat HuggingFaceTB/SmolLM2-135M-Instruct": UNRELEASED,
    "pip install outrider": UNRELEASED,
}
LIMITS = {  # verb -> options that make it quick; the last value of an option counts
    "bench": "--limit 1 --max-tokens 16 --budget 0.1",
    "certify": "--limit 2 --max-tokens 16",
    "demo": "--questions 1 --limit 1 --rounds 1",
    "explain": "--limit 1 --max-tokens 16",
    "generate": "--max-tokens 32",
    "train": "--prompts demo:10 --epochs 1 --measuring measure_limit=1 --measuring measure_tokens=16",
    "tune": "--limit 4 --max-tokens 16 --space finalists=1",
}
TYPED = {"chat": "Question: 1 + 1?\n/quit\n"}  # verb -> what is typed at it
PROMPTS = "".join(
    f'{{"prompt": "Question: Sam has {n} apples and buys 4 more. How many are there?"}}\n'
    for n in range(3, 11)
)
MODEL_FILE = """
import sys
from pathlib import Path
from tests.gguf_files import vocabulary, write_model
from tests.helpers import tiny_llama
write_model(Path(sys.argv[1]), tiny_llama(len(vocabulary()[0])), "llama")
"""
PLACE = re.compile(r"(?:localhost|127\.0\.0\.1):8000")
FENCE = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXTRAS = re.compile(r"pip install '\.\[([\w,]+)\]'")
NEEDY = re.compile(r"Sections? ([\d, and]+) needs? more packages: `" + EXTRAS.pattern)
COMMENT = re.compile(r"(^|\s{2,})#\s.*$")
# on a busy machine
STEP_S = 600
READY_S = 120
END_S = 60


@dataclass(frozen=True)
class Step:
    """One command or program of a page."""

    page: str
    line: int  # of the page
    language: str  # "sh" or "python"
    code: str
    extras: frozenset[str]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.page}:{self.line} {self.code.splitlines()[0]}"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.code)

    @property
    def is_server(self) -> bool:
        return self.language == "sh" and self.words[:2] == ["outrider", "serve"]


def steps_of(page: str, text: str) -> Iterator[Step]:
    """All commands and programs of a page, in their order, each with the extras that the page names
    for it."""
    needy = {
        number: set(names.split(","))
        for found, names in NEEDY.findall(text)
        for number in re.findall(r"\d+", found)
    }
    installed: frozenset[str] = frozenset()
    for block in FENCE.finditer(text):
        language, code = block.groups()
        headings = re.findall(r"^## (\d+)\.", text[: block.start()], re.MULTILINE)
        section = frozenset(needy.get(headings[-1], ())) if headings else frozenset[str]()
        first_line = text[: block.start(2)].count("\n") + 1
        pieces = [(0, code)] if language == "python" else _commands(code)
        for line, piece in pieces:
            if found := EXTRAS.match(piece):
                installed = frozenset(found[1].split(","))
            else:
                yield Step(
                    page,
                    first_line + line,
                    language,
                    piece,
                    installed | section | MADE.get(piece, frozenset()),
                )


def _commands(block: str) -> Iterator[tuple[int, str]]:
    """(Line of the block, command) of what a shell would run, without comments; lines that end in a
    backslash are joined."""
    joined = ""
    first = 0
    for number, line in enumerate(block.splitlines()):
        first = first if joined else number
        joined += COMMENT.sub("", line)
        if joined.endswith("\\"):
            joined = joined[:-1]
        elif joined.strip():
            yield first, joined.strip()
            joined = ""


def adapted(step: Step, port: int) -> Step:
    """The step with stand-ins, small limits and a free port."""
    code = step.code
    for theirs, ours in STAND_INS.items():
        code = re.sub(rf"(?<![\w/-]){re.escape(theirs)}(?![\w/-])", ours, code)
    code = PLACE.sub(f"127.0.0.1:{port}", code)
    if step.language == "sh":
        code = "".join(_limited(part, port) for part in re.split(r"(\s(?:&&|\|\|?)\s)", code))
    return replace(step, code=code)


def _limited(command: str, port: int) -> str:
    """A command between `&&` or `|` with what makes it quick, or makes its failure seen."""
    words = command.split()
    if words[:1] == ["curl"]:
        return command.replace("curl", "curl --silent --show-error --fail-with-body", 1)
    if words[:1] != ["outrider"]:
        return command
    if words[1] == "serve":
        return f"{command} --port {port}"
    typed = f"printf %s {shlex.quote(TYPED[words[1]])} | " if words[1] in TYPED else ""
    return typed + " ".join([command, *LIMITS.get(words[1], "").split()])


class Environment:
    """A virtual environment, and what runs in it."""

    def __init__(self, folder: Path, torch: Sequence[str]) -> None:
        self._bin = folder / "bin"
        venv.create(folder, with_pip=True)
        self.pip(*torch)

    @property
    def variables(self) -> dict[str, str]:
        """No package of the checkout, no hub; byte code is kept, else every command compiles
        torch's Python again."""
        others = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        }
        return {**others, "PATH": f"{self._bin}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}

    def pip(self, *arguments: str) -> None:
        options = ["--disable-pip-version-check", "install", "--quiet", "--quiet", "--no-compile"]
        subprocess.run(
            [self._bin / "python", "-m", "pip", *options, *arguments],
            check=True,
            env=self.variables,
        )

    def write_model(self, path: Path) -> None:
        """A small random model as a GGUF file."""
        variables = {**self.variables, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [self._bin / "python", "-c", MODEL_FILE, str(path)], check=True, env=variables
        )

    def run(self, step: Step, folder: Path) -> str:
        """What went wrong; empty: nothing."""
        command = (
            [str(self._bin / "python"), "-c", step.code]
            if step.language == "python"
            else ["bash", "-c", step.code]
        )
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=STEP_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not finished after {STEP_S} s"
        return f"ended with {done.returncode}:\n{_end_of(done.stdout)}" if done.returncode else ""

    @contextlib.contextmanager
    def server(self, step: Step, folder: Path, port: int, troubles: list[str]) -> Iterator[None]:
        """A server that answers meanwhile; what goes wrong with it is added to `troubles`."""
        log = folder / "server.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                step.words, cwd=folder, env=self.variables, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                if not _is_ready(port, process):
                    troubles.append(
                        f"not ready after {READY_S} s, or ended:\n{_end_of(log.read_text())}"
                    )
                yield
            finally:
                process.terminate()
                try:
                    code = process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    code = -1
        if code and not troubles:
            troubles.append(f"ended with {code} when asked to end:\n{_end_of(log.read_text())}")


def _is_ready(port: int, process: subprocess.Popen[bytes]) -> bool:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as answer,
        ):
            return bool(answer.status == 200)
        time.sleep(0.2)
    return False


def _end_of(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-20:])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_steps(environment: Environment, steps: Sequence[Step], folder: Path) -> int:
    """How many steps failed. A server runs for the `curl` commands that follow it."""
    failures = 0
    waiting = list(steps)
    while waiting:
        step = waiting.pop(0)
        troubles = list[str]()
        port = free_port()
        began = time.monotonic()
        if step.is_server:
            asking = []
            while waiting and waiting[0].code.startswith("curl "):
                asking.append(waiting.pop(0))
            with environment.server(adapted(step, port), folder, port, troubles):
                for one in asking if not troubles else ():
                    if trouble := environment.run(adapted(one, port), folder):
                        troubles.append(f"{one.name}\n{trouble}")
        elif trouble := environment.run(adapted(step, port), folder):
            troubles.append(trouble)
        failures += bool(troubles)
        seconds = time.monotonic() - began
        print(
            f"{'FAILED' if troubles else 'ran'} {step.name} ({seconds:.0f} s)",
            *troubles,
            sep="\n",
            flush=True,
        )
    return failures


def main() -> int:
    """The exit code: 1 where a command of a page fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch", default="torch", help="what pip installs first, with its options"
    )
    torch = shlex.split(parser.parse_args().torch)
    failures = 0
    steps = [
        step for page in PAGES for step in steps_of(page, (ROOT / page).read_text(encoding="utf-8"))
    ]
    for step in steps:
        if step.code in SKIPPED:
            print(f"left out: {step.name}: {SKIPPED[step.code]}")
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        for page in PAGES:
            (top / page).mkdir(parents=True)
            (top / page / "my-prompts.jsonl").write_text(PROMPTS, encoding="utf-8")
        build = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "wheel",
            "--quiet",
            "--no-deps",
        ]
        subprocess.run([*build, "--wheel-dir", str(top), str(ROOT)], check=True)
        wheel = next(top.glob("*.whl"))
        environment = None
        installed = frozenset[str]()
        for extras in sorted(
            {step.extras for step in steps}, key=lambda names: (len(names), sorted(names))
        ):
            named = ",".join(sorted(extras))
            print(
                f"an environment with {f'the extras {named}' if named else 'no extras'}", flush=True
            )
            # what it has is more than the page names
            if environment is None or not installed <= extras:
                environment = Environment(top / f"environment-{named}", torch)
            installed = extras
            environment.pip(f"outrider[{named}] @ {wheel.as_uri()}")
            for page in PAGES:
                if not (model := top / page / "model-Q4_K_M.gguf").exists():
                    environment.write_model(model)
                chosen = [
                    one
                    for one in steps
                    if (one.page, one.extras) == (page, extras) and one.code not in SKIPPED
                ]
                failures += run_steps(environment, chosen, top / page)
    print(
        f"{failures} commands of the pages failed" if failures else "all commands of the pages ran"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
