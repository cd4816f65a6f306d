"""A drafter here and in vLLM: acceptance compared, refusals, deaths, timeouts, Ctrl-C, with a
Python that looks like one that has vLLM; and the real one where it is installed
(OUTRIDER_VLLM_PYTHON, or .peers/vllm of benchmarks/setup_peers.sh)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.demo import demo_paths
from outrider.errors import ConfigError
from outrider.models.heads.block import BlockHead
from outrider.models.heads.eagle_files import save_eagle
from outrider.models.heads.medusa import MedusaConfig, MedusaHeads
from outrider.train.export import Target, export
from tests.heads import random_eagle
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.train.test_obstacles import DFLASH

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = Path(
    os.environ.get("OUTRIDER_VLLM_PYTHON", REPOSITORY / ".peers" / "vllm" / "bin" / "python")
)
needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason="no vLLM here (OUTRIDER_VLLM_PYTHON, benchmarks/setup_peers.sh)"
)
BENCHMARKS = str(REPOSITORY / "benchmarks")
COUNTED = {"drafts": 10, "drafted": 40, "accepted": 0, "accepted_per_position": [0, 0, 0, 0]}
PROMPTS = ("one", "two", "three")
Comparison = Callable[..., Any]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def python(folder: Path, body: str) -> Path:
    """Asked like a Python, it has vLLM; instead of drafting it does `body` with `task` and
    `answer`, a path."""
    script = folder / "fake.py"
    program = folder / "python"
    head = "import json, os, sys, time\nfrom pathlib import Path\nif sys.argv[1] == '-c': sys.exit(0)\n"
    script.write_text(
        f"{head}task, answer = json.loads(Path(sys.argv[2]).read_text()), "
        f"Path(sys.argv[3])\n{body}\n"
    )
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    program.chmod(0o755)
    return program


def answering(counters: dict[str, Any], texts: list[list[int]]) -> str:
    """The body of one that answers, and leaves its task in seen.json beside itself."""
    content = {"versions": {"vllm": "9.9"}, "counters": counters, "tokens": texts}
    return f"Path(__file__).with_name('seen.json').write_text(json.dumps(task))\nanswer.write_text({json.dumps(content)!r})"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a random EAGLE-3 head for it, and three prompts."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(257, num_hidden_layers=3, max_position_embeddings=256)
    save_checkpoint(folder / "target", target, byte_tokenizer())
    save_eagle(random_eagle("eagle3", target.config), folder / "head")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS)
    )
    return folder


@pytest.fixture
def compare(models: Path, tmp_path: Path) -> Comparison:
    """The comparison with a Python of the test's, on three prompts."""

    def run(program: Path, timeout_s: float = 50.0) -> Any:
        comparing = import_module("in_vllm.compare")
        target = Target.load(str(models / "target"))
        head = models / "head"
        out = tmp_path / "out"
        if not out.exists():
            export(head, "raw", out, target)
        how = comparing.Comparing(
            [ids(text) for text in PROMPTS],
            comparing.method_for("eagle3", head, target),
            12,
            1,
            timeout_s,
        )
        interpreter = import_module("in_vllm.process").Interpreter(str(program))
        return comparing.compare(interpreter, "eagle3", head, out, target, how, tmp_path / "log")

    return run


@pytest.mark.slow
def test_within_and_beyond(models: Path, tmp_path: Path, compare: Comparison) -> None:
    """The verdict follows the counters: those that we count ourselves are within 3 %, others are
    not. Guards the task that vLLM is given, too: ids of the prompts, the exported folder, the
    target's dtype."""
    many = COUNTED | {"accepted": 35, "accepted_per_position": [10, 10, 10, 5]}
    found = compare(python(tmp_path, answering(many, greedy(models))))
    assert not found.is_within
    assert found.vllm.tau == pytest.approx(4.5)
    assert (found.departures, found.same_texts) == (0, 3)
    ours = found.outrider
    assert ours.drafted == 4 * ours.drafts  # every draft in full, the last one of an answer, too
    assert 3 * 11 <= ours.accepted + ours.drafts <= 3 * (11 + 4)
    task = json.loads((tmp_path / "seen.json").read_text())
    assert task["prompts"] == [byte_tokenizer()(text)["input_ids"] for text in PROMPTS]
    assert task["speculative"] == {
        "method": "eagle3",
        "model": str(tmp_path / "out"),
        "num_speculative_tokens": 4,
    }
    assert (task["dtype"], task["threads"], task["target"]) == (
        "float32",
        1,
        str(models / "target"),
    )
    again = compare(python(tmp_path, answering(vars(ours), greedy(models))))
    assert again.is_within
    assert again.tau_ratio == 1


@pytest.mark.slow
def test_ours_follows_the_text_of_vllm(models: Path, tmp_path: Path, compare: Comparison) -> None:
    """Where the target's choice is another one, ours goes on along vLLM's text, whose tail is then
    its own again. Catches an acceptance that is measured on another text."""
    texts = greedy(models)
    texts[1][5] = (texts[1][5] + 1) % 257
    with LLM(models / "target", drafter="none", runtime="eager") as llm:
        tail = llm.generate(
            [ids(PROMPTS[1]) + texts[1][:6]], SamplingParams(max_tokens=6, ignore_eos=True)
        )[0].token_ids
    texts[1][6:] = tail
    found = compare(python(tmp_path, answering(COUNTED, texts)))
    assert (found.departures, found.same_texts) == (1, 2)


def greedy(models: Path) -> list[list[int]]:
    """What the target answers by itself."""
    with LLM(models / "target", drafter="none", runtime="eager") as llm:
        done = llm.generate(
            [ids(text) for text in PROMPTS], SamplingParams(max_tokens=12, ignore_eos=True)
        )
    return [list(one.token_ids) for one in done]


def ids(text: str) -> list[int]:
    return list(byte_tokenizer()(text)["input_ids"])


def test_what_vllm_refuses_is_reported(tmp_path: Path, compare: Comparison) -> None:
    """Its own words without the repeated input, ours behind them where we know more, and the end of
    its log."""
    refusal = "ValidationError: 1 error\\n  Model Runner V1 does not support: dspark speculative decoding [type=value_error, x]"
    body = f"print('line of the log')\nanswer.write_text(json.dumps({{'error': '{refusal}'}}))\nsys.exit(1)"
    with pytest.raises(import_module("in_vllm.process").VllmError) as refused:
        compare(python(tmp_path, body))
    assert (
        "does not support: dspark speculative decoding. That is: vLLM runs heads with a Markov"
        in refused.value.reason
    )
    assert "type=value_error" not in refused.value.reason
    assert refused.value.tail() == ["line of the log"]


@pytest.mark.slow
def test_death_and_timeout(tmp_path: Path, compare: Comparison) -> None:
    """Neither a worker that dies nor one that hangs looks like a comparison, and the hanging one is
    gone afterwards."""
    error = import_module("in_vllm.process").VllmError
    with pytest.raises(error, match="vLLM ended with code 1 and no answer"):
        compare(python(tmp_path, "sys.exit('out of memory')"))
    pid_file = tmp_path / "pid"
    hanging = python(
        tmp_path, f"Path({str(pid_file)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    with pytest.raises(
        error, match="vLLM was not done within 1 s; --timeout SECONDS gives it more"
    ):
        compare(hanging, timeout_s=1)
    assert is_gone(int(pid_file.read_text()))


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, SystemExit),
        (signal.SIGHUP, SystemExit),
    ],
)
def test_interrupted(tmp_path: Path, number: int, expected: type[BaseException]) -> None:
    """Ctrl-C and what ends us otherwise come through at once, and take vLLM and what it started
    along."""
    pid_file = tmp_path / "pids"
    body = f"child = os.fork()\nif child: Path({str(pid_file)!r}).write_text(f'{{os.getpid()}} {{child}}')\ntime.sleep(60)"
    interpreter = import_module("in_vllm.process").Interpreter(str(python(tmp_path, body)))

    def press() -> None:
        while not pid_file.exists() or not pid_file.read_text():
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    pressing = threading.Thread(target=press)
    pressing.start()
    before = signal.getsignal(number)
    with pytest.raises(expected) as ended:
        interpreter.ask({}, tmp_path, tmp_path / "log", 50)
    pressing.join()
    assert expected is KeyboardInterrupt or ended.value.args == (128 + number,)
    assert signal.getsignal(number) == before
    assert all(is_gone(int(pid)) for pid in pid_file.read_text().split())


@pytest.mark.slow
def test_killed(tmp_path: Path) -> None:
    """Nobody can say a word then. Catches vLLM, and what it started, computing on for nobody after
    the out-of-memory killer took us. The worker is the real one, vLLM and its torch are not."""
    pid_file = tmp_path / "pids"
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "torch.py").write_text("")
    (libraries / "vllm.py").write_text(
        "import os, time\nfrom pathlib import Path\nchild = os.fork()\n"
        f"if child: Path({str(pid_file)!r}).write_text(f'{{os.getpid()}} "
        f"{{child}}')\ntime.sleep(60)"
    )
    program = (
        f"import os, sys\nfrom pathlib import Path\nsys.path.insert(0, {BENCHMARKS!r})\nfrom in_vllm.process import Interpreter\n"
        f"os.environ['PYTHONPATH'], folder = {str(libraries)!r}, Path({str(tmp_path)!r})\n"
        "Interpreter(sys.executable).ask({'threads': None}, folder, folder / 'log', 50)"
    )
    asking = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    while asking.poll() is None and (not pid_file.exists() or not pid_file.read_text()):
        time.sleep(0.05)
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert not any(is_gone(pid, 0.0) for pid in pids)
    asking.kill()
    asking.wait()
    assert all(is_gone(pid) for pid in pids)


def is_gone(pid: int, within_s: float = 2.0) -> bool:
    """A zombie that waits for init counts as gone."""
    until = time.monotonic() + within_s
    status = Path(f"/proc/{pid}/stat")
    while True:
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)


def test_interpreters_without_vllm(tmp_path: Path) -> None:
    """Refused by name."""
    find = import_module("in_vllm.process").Interpreter.find
    without = tmp_path / "without"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    cases = {
        tmp_path: "is a folder. Perhaps",
        tmp_path / "none": "cannot be run: No such file",
        without: "cannot import vllm",
    }
    for path, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            find(str(path))


def test_methods() -> None:
    """vLLM's names, and lengths that both engines can draft: a block whole, no more tokens than
    Medusa heads."""
    methods = import_module("in_vllm.methods")
    target = tiny_llama(40, num_hidden_layers=3).requires_grad_(False)
    marked = replace(DFLASH, markov_rank=4, sample_from_anchor=True)
    heads = {
        "medusa": MedusaHeads(MedusaConfig(64, 40, 3)),
        "eagle3": random_eagle("eagle3", target.config),
        "draft-model": None,
        "block": BlockHead.new(DFLASH, target),
    }
    found = [methods.method_of(kind, head) for kind, head in heads.items()]
    found.append(methods.method_of("block", BlockHead.new(marked, target)))
    assert [(one.name, one.num_draft_tokens) for one in found] == [
        ("medusa", 3),
        ("eagle3", 4),
        ("draft_model", 4),
        ("dflash", 5),
        ("dspark", 6),
    ]
    assert methods.explained("anything else") == "anything else"


def test_ratios() -> None:
    """tau counts the token behind every draft; no drafts at all divide nothing."""
    acceptance = import_module("in_vllm.compare").Acceptance
    one = acceptance(drafts=4, drafted=16, accepted=6, accepted_per_position=[3, 2, 1, 0])
    assert one.tau == 2.5
    assert one.per_position == [0.75, 0.5, 0.25, 0.0]
    assert acceptance(drafts=0, drafted=0, accepted=0, accepted_per_position=[]).tau == 1


@pytest.mark.slow
@needs_vllm
def test_drafters_do_in_vllm_what_they_do_here() -> None:
    """The embedded EAGLE-3 head in both its layouts and the embedded draft model, in the real vLLM:
    within 3 % of ours."""
    pair = demo_paths().draft.parent
    heads = [f"{layout}={pair / 'heads' / 'eagle3'}:{layout}" for layout in ("raw", "speculators")]
    asked = [
        "head_in_vllm.py",
        "demo",
        *heads,
        f"draft={demo_paths().draft}:transformers",
        "--limit",
        "6",
        "--threads",
        "1",
    ]
    subprocess.run(
        [sys.executable, *asked, "--python", str(PYTHON), "--dry"], cwd=BENCHMARKS, check=True
    )
