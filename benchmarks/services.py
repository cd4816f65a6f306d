"""What a draft service is worth at which distance: tokens per second against the round trip to it.

One process decodes the same greedy prompts in turn, forwards and backwards, with

    plain            no drafts
    co-located       the draft model in the same process
    remote           the same draft model as a service behind a wire, asked after every step

The wire is tests/network: a network namespace for each side, and a process between them that holds
packets back. Everything has one thread: the service stands for another machine, so it must not take
the target's processor, nor lend it one. All texts must be equal. Needs Linux and root.

    python benchmarks/services.py                  the demo pair, its target widened to 100M parameters
    python benchmarks/services.py --target FOLDER --draft MODEL --workload embedded:chat        a real pair
    python benchmarks/services.py --render benchmarks/results/services-DATE.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer
from peers import inflated
from rich.table import Table
from workload import (
    BENCHMARKS,
    REPOSITORY,
    OtherCpu,
    console,
    encode,
    model_name,
    model_pair,
    prompt_texts,
    read_result,
    write_result,
)

from outrider import __version__
from outrider.models.source import resolve

sys.path.insert(0, str(REPOSITORY))
from tests.network.network import Network, outliving_nobody, why_not
from tests.network.parts import DRAFT_PORT, Part

PLAIN = "plain"
LOCAL = "co-located"
REMOTE = "remote"
NAMES = (PLAIN, LOCAL, REMOTE)
ROUND_TRIPS_MS = "0,1,10,50"
LONGEST = 2048  # tokens of prompt and answer


class Worker:
    """`services_worker.py` on a host of the network."""

    def __init__(self, network: Network, host: str, wanted: dict[str, Any]) -> None:
        paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        with network.inside(host):
            self.process = subprocess.Popen(
                outliving_nobody([sys.executable, str(BENCHMARKS / "services_worker.py")]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            )
        self.loaded = self.ask(wanted)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a line and wait for the answer's."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise typer.BadParameter("the process that runs the steps ended; its words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True)
class Setup:
    """Which model is decoded, and who drafts for it."""

    target: Path
    draft: Path
    k: int
    runtime: str

    @property
    def service(self) -> list[str]:
        """What starts the draft service, after `outrider`."""
        return [
            "service",
            "draft",
            str(self.draft),
            "--host",
            "0.0.0.0",
            "--port",
            str(DRAFT_PORT),
            "--model-options",
            f"runtime={self.runtime}",
        ]

    @property
    def beside(self) -> dict[str, Any]:
        """Options for drafting in the target's own process."""
        return {
            "drafter": "draft-model",
            "num_draft_tokens": self.k,
            "draft": str(self.draft),
        }


@contextmanager
def deployment(setup: Setup) -> Iterator[tuple[Network, Worker]]:
    """The draft service at one end of the wire, the process that runs the steps at the other."""
    with tempfile.TemporaryDirectory() as folder, Network("steps", "drafts") as network:
        service = (
            Part(network, "drafts", setup.service, DRAFT_PORT, Path(folder) / "draft.log")
            .start()
            .wait()
        )
        configurations: dict[str, Any] = {
            PLAIN: {"drafter": "none"},
            LOCAL: setup.beside,
            REMOTE: {
                "drafter": "remote",
                "num_draft_tokens": setup.k,
                "drafter_options": {"endpoint": service.address},
            },
        }
        loaded = {
            "target": str(setup.target),
            "runtime": setup.runtime,
            "configurations": configurations,
        }
        worker = Worker(network, "steps", loaded)
        try:
            yield network, worker
        finally:
            worker.process.kill()
            worker.process.wait()


def measured(
    network: Network,
    worker: Worker,
    prompts: list[list[int]],
    round_trips: list[float],
    rounds: int,
    tokens: int,
) -> list[dict[str, Any]]:
    """Every run. Raises RuntimeError where two configurations write different texts."""
    runs: list[dict[str, Any]] = []
    for name in NAMES:
        worker.ask({"name": name, "prompt": prompts[0], "max_tokens": 16})
    for turn in range(rounds):
        for round_trip_ms in round_trips:
            network.change(round_trip_s=round_trip_ms / 1000)
            # what is known about the wire, and of the last prompt on its way, is of this one
            for name in NAMES:
                worker.ask({"name": name, "prompt": prompts[-1], "max_tokens": 16})
            for number, prompt in enumerate(prompts):
                texts = {}
                for name in NAMES if (turn + number) % 2 == 0 else NAMES[::-1]:
                    others = OtherCpu(psutil.Process(worker.process.pid))
                    answer = worker.ask({"name": name, "prompt": prompt, "max_tokens": tokens})
                    texts[name] = answer.pop("token_ids")
                    runs.append(
                        {
                            "name": name,
                            "round_trip_ms": round_trip_ms,
                            "prompt": number,
                            "round": turn,
                            "other_cpu": round(others.share(), 3),
                            **answer,
                        }
                    )
                different = [name for name in NAMES if texts[name] != texts[PLAIN]]
                if different:
                    raise RuntimeError(
                        f"prompt {number} at {round_trip_ms} ms: {', '.join(different)} wrote "
                        "another text than plain"
                    )
    return runs


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each round trip and configuration; speeds over plain are medians over the pairs
    of runs of one prompt."""
    plain = {key(run): run["stats"]["decode_tokens_per_s"] for run in runs if run["name"] == PLAIN}
    rows = []
    for round_trip_ms in sorted({run["round_trip_ms"] for run in runs}):
        for name in NAMES:
            matching = [
                run for run in runs if run["name"] == name and run["round_trip_ms"] == round_trip_ms
            ]
            remote = {
                what: sum(run["remote"].get(f"remote_draft_{what}", 0.0) for run in matching)
                for what in ("hits", "waits", "misses")
            }
            wanted = sum(remote.values())
            rows.append(
                {
                    "round_trip_ms": round_trip_ms,
                    "name": name,
                    "tokens_per_s": median(run["stats"]["decode_tokens_per_s"] for run in matching),
                    "over_plain": median(
                        run["stats"]["decode_tokens_per_s"] / plain[key(run)] for run in matching
                    ),
                    "tau": sum(run["stats"]["emitted"] for run in matching)
                    / sum(run["stats"]["steps"] for run in matching),
                    **{
                        f"{what}_rate": count / wanted if wanted else None
                        for what, count in remote.items()
                    },
                }
            )
    return rows


def key(run: dict[str, Any]) -> tuple[float, int, int]:
    """What two runs share that are compared."""
    return run["round_trip_ms"], run["prompt"], run["round"]


def table(result: dict[str, Any]) -> Table:
    """What a reader of the terminal sees."""
    shown = Table(
        title=f"Draft service across a wire: {result['target']}, {result['draft']}, k = "
        f"{result['k']}"
    )
    for column in (
        "round trip",
        "drafts",
        "tokens/s",
        "over plain",
        "tokens/step",
        "at hand",
        "waited for",
        "missed",
    ):
        shown.add_column(column, justify="left" if column == "drafts" else "right")
    before = None
    for row in result["summary"]:
        rates = [row[f"{what}_rate"] for what in ("hits", "waits", "misses")]
        shown.add_row(
            "" if before == row["round_trip_ms"] else f"{row['round_trip_ms']:g} ms",
            row["name"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['over_plain']:.2f}",
            f"{row['tau']:.2f}",
            *("" if rate is None else f"{rate:.0%}" for rate in rates),
        )
        before = row["round_trip_ms"]
    return shown


def setup_of(target: Path | None, draft: Path | None, pair: str, k: int, runtime: str) -> Setup:
    """Models of one's own, or a pair. Raises typer's error for one without the other."""
    if (target is None) != (draft is None):
        raise typer.BadParameter("--target and --draft go together: give both or neither")
    if target is None or draft is None:
        target, draft = model_pair(pair)
    return Setup(target, draft, k, runtime)


def prompts_of(workload: str, model: Path, limit: int, tokens: int) -> list[list[int]]:
    """A workload's first prompts, in the model's chat template where they are conversations."""
    from outrider.lab.workload.load import load_workload
    from outrider.lab.workload.prompts import prepare
    from outrider.models.loading.load import load_tokenizer

    chosen = load_workload(workload, limit=limit, on_bad="refuse", data=None)
    prepared = prepare(
        chosen, load_tokenizer(resolve(str(model))), context=LONGEST, max_tokens=tokens
    )
    return [prompt.tokens for prompt in prepared.prompts[:limit]]


def main(
    pair: Annotated[
        str, typer.Option(help="demo, shared, or a folder with `target` and `draft`.")
    ] = "demo",
    mlp: Annotated[
        int,
        typer.Option(
            help="Widen the MLPs of the pair's target to this, which changes no token; 0: as it is."
        ),
    ] = 10368,
    target: Annotated[
        Path | None, typer.Option(help="Instead of a pair: a model folder or .gguf file, as it is.")
    ] = None,
    draft: Annotated[Path | None, typer.Option(help="Its draft model, for --target.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="A workload's prompts (docs/workloads.md), in the chat template; else GSM8K's "
            "questions."
        ),
    ] = None,
    k: Annotated[int, typer.Option(help="Draft tokens a step.", min=1)] = 4,
    limit: Annotated[int, typer.Option(help="Prompts.", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="Times that each prompt is decoded.", min=1)] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=16)] = 64,
    round_trips: Annotated[str, typer.Option(help="Milliseconds, with commas.")] = ROUND_TRIPS_MS,
    runtime: Annotated[str, typer.Option(help="Outrider's runtime, of every model.")] = "auto",
    out: Annotated[bool, typer.Option("--out/--no-out", help="Write the result file.")] = True,
    render: Annotated[
        Path | None, typer.Option(help="Print the table of a stored result, and nothing else.")
    ] = None,
) -> None:
    """Measure, print a table, write benchmarks/results/services-DATE.json."""
    screen = console()
    if render is not None:
        screen.print(table(read_result(render)))
        return
    reason = why_not()
    if reason is not None:
        raise typer.BadParameter(f"no wire on this machine: {reason}")
    setup = setup_of(target, draft, pair, k, runtime)
    widened = None
    if target is None:
        folder, widened = inflated(setup.target, mlp, 0)
        setup = replace(setup, target=folder)
    if workload is None and target is not None:
        raise typer.BadParameter(
            "--target needs --workload: GSM8K's plain questions are for the pairs trained on them"
        )
    texts = prompt_texts(limit) if workload is None else []
    prompts = (
        encode(texts, setup.target)
        if workload is None
        else prompts_of(workload, setup.target, limit, tokens)
    )
    with deployment(setup) as (network, worker):
        runs = measured(
            network,
            worker,
            prompts,
            [float(part) for part in round_trips.split(",")],
            rounds,
            tokens,
        )
    content = {
        "outrider": __version__,
        "target": model_name(setup.target),
        "draft": model_name(setup.draft),
        "workload": workload or "gsm8k",
        "widened": widened,
        "k": k,
        "tokens": tokens,
        "runtime": runtime,
        "summary": summary(runs),
        "runs": runs,
        "notes": worker.loaded["notes"],
    }
    if out:
        screen.print(f"written: {write_result('services', content, 1).name}")
    screen.print(table(content))


if __name__ == "__main__":
    typer.run(main)
