"""`outrider export --check` and vLLM: acceptance compared, refusals, deaths, timeouts, Ctrl-C, with a Python that only looks like
one that has vLLM; and the real one where it is installed (OUTRIDER_VLLM_PYTHON, or .peers/vllm of benchmarks/setup_peers.sh)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.demo import demo_paths
from outrider.errors import ConfigError
from outrider.lab.result import read_result
from outrider.models.heads.eagle_files import save_eagle
from outrider.train.export_result import Acceptance, Compared, ExportResult
from outrider.train.vllm.process import Interpreter, VllmError
from tests.heads import random_eagle
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = Path(os.environ.get("OUTRIDER_VLLM_PYTHON", REPOSITORY / ".peers" / "vllm" / "bin" / "python"))
needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM here (OUTRIDER_VLLM_PYTHON, benchmarks/setup_peers.sh)")
COUNTED = {"drafts": 10, "drafted": 40, "accepted": 0, "accepted_per_position": [0, 0, 0, 0]}
PROMPTS = ("one", "two", "three")
Run = Callable[..., Any]


def python(folder: Path, body: str) -> Path:
    """Asked like a Python, it has vLLM; instead of drafting it does `body` with `task` and `answer`, a path."""
    script, program = folder / "fake.py", folder / "python"
    head = "import json, os, sys, time\nfrom pathlib import Path\nif sys.argv[1] == '-c': sys.exit(0)\n"
    script.write_text(f"{head}task, answer = json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])\n{body}\n")
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
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return folder


@pytest.fixture
def export(models: Path, tmp_path: Path, cli: Run) -> Run:
    def run(*more: str, out: str = "out") -> Any:
        fixed = ("--target", str(models / "target"), "--to", "raw", "--out", str(tmp_path / out))
        return cli("export", str(models / "head"), *fixed, *more)

    return run


def compared(models: Path, *more: str) -> tuple[str, ...]:
    fixed = ("--check", "--workload", str(models / "prompts.jsonl"), "--max-new-tokens", "12", "--threads", "1")
    return (*fixed, *more)


def test_within_and_beyond(models: Path, tmp_path: Path, export: Run) -> None:
    """The verdict follows the counters: those that we count ourselves are within 3 %, others are not and the code says so. Guards
    the task that vLLM is given, too: ids of the prompts, the exported folder, the target's dtype."""
    many = COUNTED | {"accepted": 35, "accepted_per_position": [10, 10, 10, 5]}
    done = export(*compared(models, "--vllm", str(python(tmp_path, answering(many, greedy(models))))))
    assert done.code == 1
    assert "Beyond 3 %" in done.out
    found = comparison(tmp_path / "out")
    assert found.vllm.tau == pytest.approx(4.5)
    assert (found.departures, found.same_texts) == (0, 3)
    ours = found.outrider
    assert ours.drafted == 4 * ours.drafts  # every draft in full, the last one of an answer, too
    assert 3 * 11 <= ours.accepted + ours.drafts <= 3 * (11 + 4)
    task = json.loads((tmp_path / "seen.json").read_text())
    assert task["prompts"] == [byte_tokenizer()(text)["input_ids"] for text in PROMPTS]
    assert task["speculative"] == {"method": "eagle3", "model": str(tmp_path / "out"), "num_speculative_tokens": 4}
    assert (task["dtype"], task["threads"], task["target"]) == ("float32", 1, str(models / "target"))
    assert not list(tmp_path.glob("*.log"))
    same = python(tmp_path, answering(ours.model_dump(), greedy(models)))
    done = export(*compared(models, "--vllm", str(same)), out="again")
    assert done.code == 0
    assert "Within 3 %: tau in vLLM differs from ours by +0.0%" in done.out


def test_ours_follows_the_text_of_vllm(models: Path, tmp_path: Path, export: Run) -> None:
    """Where the target's choice is another one, ours goes on along vLLM's text, whose tail is then its own again. Catches an
    acceptance that is measured on another text."""
    texts = greedy(models)
    texts[1][5] = (texts[1][5] + 1) % 257
    with LLM(models / "target", drafter="none", runtime="eager") as llm:
        tail = llm.generate([ids(PROMPTS[1]) + texts[1][:6]], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids
    texts[1][6:] = tail
    export(*compared(models, "--vllm", str(python(tmp_path, answering(COUNTED, texts)))))
    found = comparison(tmp_path / "out")
    assert (found.departures, found.same_texts) == (1, 2)


def greedy(models: Path) -> list[list[int]]:
    """What the target answers by itself."""
    with LLM(models / "target", drafter="none", runtime="eager") as llm:
        done = llm.generate([ids(text) for text in PROMPTS], SamplingParams(max_tokens=12, ignore_eos=True))
    return [list(one.token_ids) for one in done]


def ids(text: str) -> list[int]:
    return list(byte_tokenizer()(text)["input_ids"])


def comparison(out: Path) -> Compared:
    found = read_result(out / "export.json")
    assert isinstance(found, ExportResult)
    assert found.compared is not None
    return found.compared


def test_what_vllm_refuses_is_said_and_kept(models: Path, tmp_path: Path, export: Run) -> None:
    """Its own words without the repeated input, ours behind them where we know more, and the end of its log."""
    refusal = "ValidationError: 1 error\\n  Model Runner V1 does not support: dspark speculative decoding [type=value_error, x]"
    body = f"print('line of the log')\nanswer.write_text(json.dumps({{'error': '{refusal}'}}))\nsys.exit(1)"
    done = export(*compared(models, "--vllm", str(python(tmp_path, body))))
    assert done.code == 1
    assert "does not support: dspark speculative decoding. That is: vLLM runs heads with a Markov" in done.err
    assert "type=value_error" not in done.err
    assert "vllm: line of the log" in done.err
    found = read_result(tmp_path / "out" / "export.json")
    assert isinstance(found, ExportResult)
    assert found.compared is None
    assert found.not_compared.startswith("not compared: ValidationError")


def test_death_and_timeout(models: Path, tmp_path: Path, export: Run) -> None:
    """Neither a worker that dies nor one that hangs looks like a comparison, and the hanging one is gone afterwards."""
    done = export(*compared(models, "--vllm", str(python(tmp_path, "sys.exit('out of memory')"))))
    assert done.code == 1
    assert "vLLM ended with code 1 and no answer" in done.err
    assert "vllm: out of memory" in done.err
    place = tmp_path / "pid"
    hanging = python(tmp_path, f"Path({str(place)!r}).write_text(str(os.getpid()))\ntime.sleep(60)")
    done = export(*compared(models, "--vllm", str(hanging), "--vllm-timeout", "1"), out="hanging")
    assert done.code == 1
    assert "vLLM was not done within 1 s; --vllm-timeout SECONDS gives it more" in done.err
    assert is_gone(int(place.read_text()))


@pytest.mark.parametrize(("number", "expected"), [
    (signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit),
])  # fmt: skip
def test_interrupted(tmp_path: Path, number: int, expected: type[BaseException]) -> None:
    """Ctrl-C and what ends us otherwise come through at once, and take vLLM and what it started along."""
    place = tmp_path / "pids"
    body = f"child = os.fork()\nif child: Path({str(place)!r}).write_text(f'{{os.getpid()}} {{child}}')\ntime.sleep(60)"
    interpreter = Interpreter(str(python(tmp_path, body)))

    def press() -> None:
        while not place.exists() or not place.read_text():
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
    assert all(is_gone(int(pid)) for pid in place.read_text().split())


def test_killed(tmp_path: Path) -> None:
    """Nobody can say a word then. Catches vLLM, and what it started, computing on for nobody after the out-of-memory killer took
    us. The worker is the real one, vLLM and its torch are not."""
    place, libraries = tmp_path / "pids", tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "torch.py").write_text("")
    (libraries / "vllm.py").write_text(
        "import os, time\nfrom pathlib import Path\nchild = os.fork()\n"
        f"if child: Path({str(place)!r}).write_text(f'{{os.getpid()}} {{child}}')\ntime.sleep(60)"
    )
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom outrider.train.vllm.process import Interpreter\n"
        f"os.environ['PYTHONPATH'], folder = {str(libraries)!r}, Path({str(tmp_path)!r})\n"
        "Interpreter(sys.executable).ask({'threads': None}, folder, folder / 'log', 50)"
    )
    asking = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    while asking.poll() is None and (not place.exists() or not place.read_text()):
        time.sleep(0.05)
    pids = [int(pid) for pid in place.read_text().split()]
    assert not any(is_gone(pid, 0.0) for pid in pids)
    asking.kill()
    asking.wait()
    assert all(is_gone(pid) for pid in pids)


def is_gone(pid: int, within_s: float = 2.0) -> bool:
    """A zombie that waits for init counts as gone."""
    until, status = time.monotonic() + within_s, Path(f"/proc/{pid}/stat")
    while True:
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)


def test_where_there_is_no_vllm(models: Path, export: Run) -> None:
    """Said plainly; the export itself is fine."""
    done = export(*compared(models))
    assert done.code == 0
    assert "not compared: no vLLM in this Python; --vllm PYTHON names one that has it" in done.out


def test_what_cannot_be_compared(models: Path, tmp_path: Path, export: Run) -> None:
    """Options that mean nothing, no vLLM, no prompts: refused by name, before anything is written."""
    without = tmp_path / "without"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    cases = [
        (("--vllm", sys.executable, "--prompts", "3"), "--vllm, --prompts mean nothing without --check"),
        (("--check", "--vllm", str(tmp_path)), "is a folder. Perhaps"),
        (("--check", "--vllm", str(tmp_path / "none")), "cannot be run: No such file or directory"),
        (("--check", "--vllm", str(without)), "cannot import vllm"),
        (("--check", "--vllm", str(python(tmp_path, "")), "--workload", "none.jsonl"), "none.jsonl"),
    ]
    for more, message in cases:
        done = export(*more)
        assert done.code == 2, message
        assert message in done.err
    assert not (tmp_path / "out").exists()


def test_ratios() -> None:
    """tau counts the token behind every draft; no drafts at all divide nothing."""
    one = Acceptance(drafts=4, drafted=16, accepted=6, accepted_per_position=[3, 2, 1, 0])
    assert one.tau == 2.5
    assert one.per_position == [0.75, 0.5, 0.25, 0.0]
    assert Acceptance(drafts=0, drafted=0, accepted=0, accepted_per_position=[]).tau == 1


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("layout", ["raw", "speculators"])
def test_a_head_trained_here_does_in_vllm_what_it_does_here(layout: str, tmp_path: Path, cli: Run) -> None:
    """The embedded EAGLE-3 head, in the real vLLM: acceptance within 3 % of ours on the same prompts."""
    head, out = demo_paths().draft.parent / "heads" / "eagle3", tmp_path / "out"
    done = cli(
        "export", str(head), "--target", "demo", "--to", layout, "--out", str(out), "--check", "--vllm", str(PYTHON),
        "--prompts", "12", "--threads", "1",
    )  # fmt: skip
    assert done.code == 0, done.err
    found = comparison(out)
    assert found.tau_ratio == pytest.approx(1, abs=0.03)
    assert found.vllm.tau > 2


@pytest.mark.slow
@needs_vllm
def test_a_draft_model_does_in_vllm_what_it_does_here(tmp_path: Path, cli: Run) -> None:
    """The embedded draft model, in vLLM's own draft-model method and in transformers' assisted generation."""
    done = cli(
        "export", str(demo_paths().draft), "--target", "demo", "--to", "transformers", "--out", str(tmp_path / "out"), "--check",
        "--vllm", str(PYTHON), "--prompts", "6", "--threads", "1",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "transformers' assisted generation: 24 tokens in" in done.out
    assert "Within 3 %" in done.out


def test_errors_are_ours() -> None:
    """A wrong interpreter is bad input (2), a vLLM that fails is a failed run (1)."""
    with pytest.raises(ConfigError):
        Interpreter.find("/none/python")
    assert VllmError.exit_code == 1
