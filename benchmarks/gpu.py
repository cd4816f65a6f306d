"""Everything that must be asked of a real GPU, in at most eight minutes on one card: `make gpu`.

Stages run in order of value (`gpu_stages/`), each bounded in time. One JSON file is written after
every result, so an interruption loses nothing that is known. A stage that fails says why, and the
next one runs.

    python benchmarks/gpu.py                                  all stages, on cuda:0
    python benchmarks/gpu.py --only right,roof --minutes 4
    python benchmarks/gpu.py --tiny --device cpu              small shapes on a machine without a GPU

Exit status: 0 all is well; 1 a stage failed, ran out of time or missed a floor; 2 nothing could be
run; 130 Ctrl-C or SIGTERM. docs/gpu.md says what each stage asks and what has been run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent
# runs where nothing is installed but torch and transformers
for folder in (str(BENCHMARKS), str(REPOSITORY)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from gpu_stages import STAGES  # noqa: E402

SCHEMA = 1
NOT_ASKED = "not asked for"
LEAST_S = 2.0  # a stage with less is not begun
NEEDED = (  # import names of what the package needs: the stages that do without run anyway
    "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "typer", "rich", "psutil", "tqdm", "pydantic",
    "annotated_types", "scipy", "jinja2", "httpx2", "prometheus_client", "pytest", "hypothesis", "fastapi",
    "accelerate",
)  # fmt: skip


class CannotStartError(Exception):
    """Nothing can be run: no device, no torch, arguments that contradict one another."""


class Record:
    """The JSON file, rewritten after every result. What an earlier run of the same day found on the
    same card stays in it."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        self.content = {"schema": SCHEMA, **head, "stages": _found_before(path, head)}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def write(self) -> None:
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(
            json.dumps(self.content, separators=(",", ":"), default=str) + "\n", encoding="utf-8"
        )
        part.replace(self.path)

    def leave(self, stage: str) -> None:
        """A stage that is not asked for: an earlier run's result stays."""
        if stage not in self.content["stages"]:
            self.set(stage, "skipped", reason=NOT_ASKED)

    def begin(self, stage: str) -> None:
        """A stage begins: an earlier run's result goes."""
        self.content["stages"].pop(stage, None)
        self.set(stage, "running")

    def set(
        self, stage: str, status: str, seconds: float = 0.0, reason: str = ""
    ) -> dict[str, Any]:
        """What became of a stage; its result stays as it is."""
        entry = self.content["stages"].setdefault(stage, {"result": {}})
        entry |= {"status": status, "seconds": round(seconds, 1), "reason": reason}
        self.write()
        return entry

    def keep(self, stage: str, found: dict[str, Any]) -> None:
        self.content["stages"][stage]["result"].update(found)
        self.write()


def _found_before(path: Path, head: dict[str, Any]) -> dict[str, Any]:
    """The stages of an earlier run on the same card and day, with the same libraries."""
    same = ("date", "tiny", "card", "driver", "cuda", "torch", "transformers")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    stages: dict[str, Any] = content.get("stages", {})
    is_same = content.get("schema") == SCHEMA and all(
        content.get(name) == head[name] for name in same
    )
    return (
        {name: entry for name, entry in stages.items() if entry["reason"] != NOT_ASKED}
        if is_same
        else {}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages asked for; the exit status."""
    asked = parse(arguments)
    try:
        chosen = chosen_stages(asked.only, asked.skip)
        device = find_device(asked.device, asked.tiny)
        record = Record(path_of(asked, device), head_of(asked, device))
    except (CannotStartError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say(f"{record.content['card']}, torch {record.content['torch']}; results in {record.path}")
    if record.content["missing"]:
        say(
            f"missing here: {', '.join(record.content['missing'])}; stages that need them will "
            "say so"
        )
    try:
        run_stages(record, chosen, device, asked)
    except KeyboardInterrupt:
        for name in chosen:
            if record.content["stages"].get(name, {}).get("status") in (None, "running"):
                record.set(name, "skipped", reason="interrupted")
        say(f"interrupted; what is known is in {record.path}")
        return 130
    rows = table_rows(record)
    print_table(rows)
    say(f"results in {record.path}")
    entries = record.content["stages"].values()
    fine = all(entry["status"] in ("ok", "skipped") for entry in entries) and any(
        e["status"] == "ok" for e in entries
    )
    return 0 if fine and all(row[3] != "below" for row in rows) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="STAGES", help=f"comma-separated, of {', '.join(STAGES)}"
    )
    parser.add_argument(
        "--skip", default="", metavar="STAGES", help="comma-separated; the others run"
    )
    parser.add_argument("--minutes", type=positive, default=8.0, help="for everything (default: 8)")
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:N, or cpu together with --tiny (default: cuda)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, few repeats: does the script work?"
    )
    where = "benchmarks/results/gpu-CARD-DATE.json; with --tiny, a temporary file"
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"the JSON file (default: {where})"
    )
    return parser.parse_args(arguments)


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value


def chosen_stages(only: str, skip: str) -> list[str]:
    """Stages to run, in order of value."""
    wanted, unwanted = (
        [part.strip() for part in text.split(",") if part.strip()] for text in (only, skip)
    )
    if unknown := [name for name in (*wanted, *unwanted) if name not in STAGES]:
        raise CannotStartError(f"no stage '{unknown[0]}'. Stages: {', '.join(STAGES)}.")
    chosen = [name for name in STAGES if (not wanted or name in wanted) and name not in unwanted]
    if not chosen:
        raise CannotStartError("--only and --skip leave no stage to run")
    return chosen


def find_device(name: str, tiny: bool) -> Any:
    """The device with its number, as tensors name it."""
    try:
        import torch
    except ImportError as error:
        raise CannotStartError(
            f"torch cannot be imported ({error}). `make demo` installs it."
        ) from error
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CannotStartError(f"unknown device '{name}'. Use cuda, cuda:N or cpu.") from error
    if device.type == "cpu":
        if not tiny:
            raise CannotStartError(
                "the full form needs a CUDA device. On a CPU, `--tiny --device cpu` checks the "
                "script."
            )
        return device
    if device.type != "cuda":
        raise CannotStartError(f"device '{name}' is not supported. Use cuda, cuda:N or cpu.")
    if not torch.cuda.is_available():
        raise CannotStartError(
            "this torch sees no CUDA device. On a CPU, `--tiny --device cpu` checks the script."
        )
    index = device.index or 0
    count = torch.cuda.device_count()
    if index >= count:
        raise CannotStartError(
            f"there is no cuda:{index}; the last device here is cuda:{count - 1}"
        )
    return torch.device("cuda", index)


def path_of(asked: argparse.Namespace, device: Any) -> Path:
    """Where the JSON file goes. Small runs measure nothing, so they never go among the results."""
    if asked.out is not None:
        if asked.tiny and asked.out.resolve().is_relative_to(BENCHMARKS / "results"):
            raise CannotStartError(
                "a --tiny run measures nothing and does not belong into benchmarks/results"
            )
        return asked.out
    if asked.tiny:
        return Path(tempfile.mkdtemp(prefix="outrider-gpu-")) / "gpu-tiny.json"
    card = re.sub(r"[^a-z0-9]+", "-", card_of(device).lower()).strip("-")
    return BENCHMARKS / "results" / f"gpu-{card}-{today()}.json"


def head_of(asked: argparse.Namespace, device: Any) -> dict[str, Any]:
    import torch

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    given = {
        key: value
        for key, value in vars(asked).items()
        if key != "out" and value not in ("", False)
    }
    options = [f"--{key}" + ("" if value is True else f" {value}") for key, value in given.items()]
    return {
        "command": " ".join(["python benchmarks/gpu.py", *options]),
        "date": today(),
        "tiny": asked.tiny,
        "card": card_of(device),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else None,
        "driver": driver(device),
        "cuda": torch.version.cuda,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "transformers": None
        if "transformers" in missing
        else importlib.metadata.version("transformers"),
        "cpus": os.cpu_count(),
        "missing": missing,
    }


def card_of(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def driver(device: Any) -> str | None:
    """The driver's version, from the kernel module: nvidia-smi may be absent."""
    file = Path("/proc/driver/nvidia/version")
    found = (
        re.search(r"Module\D*?\s(\d+[\d.]+)", file.read_text())
        if device.type == "cuda" and file.exists()
        else None
    )
    return found[1] if found else None


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def run_stages(
    record: Record, chosen: Sequence[str], device: Any, asked: argparse.Namespace
) -> None:
    """All of them; each has its share of the time that is left, so what one does not use goes to
    the later ones."""
    end = time.monotonic() + asked.minutes * 60
    for name in STAGES:
        if name not in chosen:
            record.leave(name)
    modules = {name: found for name in chosen if (found := load_stage(record, name)) is not None}
    shares = {name: float(module.MINUTES) for name, module in modules.items()}
    for position, (name, module) in enumerate(modules.items()):
        left = end - time.monotonic()
        if left < LEAST_S:
            entry = record.set(
                name, "out of time", reason=f"not begun: the {asked.minutes:g} minutes were used up"
            )
        else:
            share = left * shares[name] / sum(list(shares.values())[position:])
            say(f"\n{name}: at most {share:.0f} s")
            entry = run_stage(record, name, module, device, asked.tiny, time.monotonic() + share)
        say(
            f"{name}: {entry['status']}"
            + (f", {entry['reason']}" if entry["reason"] else "")
            + f" ({entry['seconds']} s)"
        )


def load_stage(record: Record, name: str) -> ModuleType | None:
    """The stage's module; None, and the reason recorded, where it cannot be imported."""
    try:
        return importlib.import_module(f"gpu_stages.{name}")
    except ModuleNotFoundError as error:
        own = error.name == f"gpu_stages.{name}"
        reason = (
            f"benchmarks/gpu_stages/{name}.py is missing"
            if own
            else f"package '{error.name}' is missing here"
        )
        say(f"{name}: skipped, {reason}")
        record.set(name, "skipped" if own else "failed", reason=reason)
    except Exception as error:  # noqa: BLE001  whatever is wrong with one stage, the others run
        record.set(name, "failed", reason=message_of(error))
        say(f"{name}: failed, {message_of(error)}")
    return None


def run_stage(
    record: Record, name: str, module: ModuleType, device: Any, tiny: bool, deadline_s: float
) -> dict[str, Any]:
    """One stage to its end, and what became of it."""
    from gpu_stages.context import Context, OutOfTimeError, short_traceback

    record.begin(name)
    start = time.monotonic()
    context = Context(device, tiny, deadline_s, say, lambda found: record.keep(name, found))
    status = "ok"
    reason = ""
    try:
        record.keep(name, module.run(context) or {})
    except OutOfTimeError as error:
        status = "out of time"
        reason = str(error)
    except ModuleNotFoundError as error:
        status = "failed"
        reason = f"package '{error.name}' is missing here"
    except KeyboardInterrupt:
        record.set(name, "skipped", time.monotonic() - start, "interrupted")
        raise
    except Exception as error:  # noqa: BLE001  whatever a stage raises, the next one runs
        status = "failed"
        reason = message_of(error)
        record.keep(name, {"traceback": short_traceback(error)})
    finally:
        context.release()
    return record.set(name, status, time.monotonic() - start, reason)


def message_of(error: BaseException) -> str:
    """The error's kind and its first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def table_rows(record: Record) -> list[list[str]]:
    """Rows of [what, got, floor, "ok" | "below" | ""] of every stage that has a result."""
    rows: list[list[str]] = []
    entries = record.content["stages"]
    for name, entry in ((name, entries[name]) for name in STAGES if name in entries):
        if entry["status"] != "ok" and entry["reason"] != NOT_ASKED:
            rows.append([f"{name}: {entry['status']}", entry["reason"], "", ""])
        if not entry["result"]:
            continue
        try:
            rows += [
                [str(cell) for cell in row]
                for row in importlib.import_module(f"gpu_stages.{name}").table(entry["result"])
            ]
        except Exception as error:  # noqa: BLE001  a result cut short must not take the others' lines with it
            rows.append([f"{name}: no table", message_of(error), "", ""])
    return rows


def print_table(rows: Sequence[Sequence[str]]) -> None:
    if rows:
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        say("")
        for row in rows:
            say(
                "  ".join(
                    cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                ).rstrip()
            )


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    # `timeout` and lent machines end a command by the latter
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
