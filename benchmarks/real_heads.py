"""Heads trained for the real model on the CPU, and what they bring: SmolLM2-135M-Instruct, EAGLE-3
and a block head.

    python benchmarks/real_heads.py answers OUT         prompts, and the model's own answers (our engine, batched, T = 0 and 1)
    python benchmarks/real_heads.py train OUT eagle3    a head from those answers; `block` likewise
    python benchmarks/real_heads.py measure OUT         tau and speed against plain decoding, on prompts that no head has seen
    python benchmarks/real_heads.py render FILE         a stored result again

What was interrupted goes on with the same command. Training reads the GGUF file's values as a bf16
checkpoint; Spec-Bench, MT-bench and GSM8K's test set are held out (head_prompts.py). In `measure`
plain decoding and all drafters take turns prompt by prompt in one process, and a ratio compares two
runs of one prompt.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer
from real_formats import bf16_folder, converted
from real_model import MAX_MODEL_LEN, MODEL, Engine, gguf_file, listed, stored
from real_prompts import CATEGORIES, Prompts
from rich.table import Table
from workers import Worker
from workload import BENCHMARKS, PEERS, REPOSITORY, console, read_result, write_result

NAME = "real-heads"
PLAIN = "none"
SETTINGS = {
    "eagle3": ("draft_vocab=9728", "unrolls=3", "loss=ce", "layers=2,15,30", "kv_heads=9"),
    "block": ("num_layers=1", "block_size=5", "num_anchors=24", "target_layers=1,15,26"),
}
DRAFTINGS = {
    "eagle3": (
        "k=2 bits=4",
        "k=3 bits=4",
        "k=5 tree=best-first bits=4 verifier=gumbel",
        "k=7 tree=best-first bits=4 verifier=gumbel",
    ),
    "block": ("k=2",),
}
# a chain and copied texts in one tree
BESIDE_LOOKUPS = "composite k=7 parts=eagle3+suffix options=eagle3.bits=4;eagle3.head="
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Out = Annotated[Path, typer.Argument(help="Folder of the whole experiment.")]


@app.command()
def answers(
    out: Out,
    count: Annotated[int, typer.Option(min=2, help="Prompts.")] = 4000,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 256,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    device: Device = "cpu",
) -> None:
    """Prompts and answers; cut and called again, it goes on."""
    prompts = out / "prompts.jsonl"
    folder = out / "answers"
    out.mkdir(parents=True, exist_ok=True)
    if not prompts.exists():
        _run(
            [
                sys.executable,
                str(BENCHMARKS / "head_prompts.py"),
                str(prompts),
                "--count",
                str(count),
            ]
        )
    target, rows = (_source(), 32) if device == "cpu" else (bf16_folder(_source()), 256)
    _train(
        "eagle3",
        target,
        folder,
        threads,
        "--device",
        device,
        "--prompts",
        str(prompts),
        "--only-responses",
        "--drafter",
        "none",
        "--sampling",
        f"max_num_seqs={rows}",
        "--max-tokens",
        str(max_tokens),
        "--model-options",
        "max_model_len=1536",
        "--reading",
        "on_bad=skip",
    )


@app.command()
def train(
    out: Out,
    kind: Annotated[str, typer.Argument(help="eagle3 or block.")],
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    batch_size: Annotated[int, typer.Option(min=1)] = 4,
    lr: Annotated[float, typer.Option()] = 1e-3,
    max_steps: Annotated[
        int, typer.Option(min=0, help="Of the optimizer; 0: as the epochs say.")
    ] = 0,
    init: Annotated[
        Path | None, typer.Option(help="Folder of a head to go on from, with a new schedule.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    device: Device = "cpu",
) -> None:
    """A head from the answers; on a CPU features of the target are kept on disk from the first
    epoch on."""
    if kind not in SETTINGS:
        raise typer.BadParameter(f"kind must be one of {', '.join(SETTINGS)}, got '{kind}'")
    _train(
        " ".join([kind, *SETTINGS[kind]]),
        bf16_folder(_source()),
        out / kind,
        threads,
        "--responses",
        f"{out / 'answers' / 'responses.jsonl'}",
        "--epochs",
        str(epochs),
        "--batch-size",
        str(batch_size),
        "--training",
        f"lr={lr}",
        "--training",
        "precision=bf16",
        "--training",
        "held_out=0.03",
        "--training",
        "max_length=768",
        "--training",
        "save_every_s=120",
        "--measuring",
        "measure_limit=0",
        "--training",
        f"max_steps={max_steps}",
        "--device",
        device,
        *(["--training", "feature_cache=20GB"] if device == "cpu" else []),
        *(["--init", str(init)] if init else []),
    )


@app.command()
def measure(
    out: Out,
    weights: Annotated[
        str, typer.Option(help="Formats of the target, comma-separated.")
    ] = "Q4_1,BF16",
    categories: Annotated[str, typer.Option(help="Of prompts, comma-separated.")] = ",".join(
        CATEGORIES
    ),
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1",
    draftings: Annotated[
        str,
        typer.Option(help="In the lab's words, comma-separated; empty: the heads found in OUT."),
    ] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Of each category.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    store: Annotated[
        bool,
        typer.Option("--store/--no-store", help="Write benchmarks/results/real-heads-DATE.json."),
    ] = True,
) -> None:
    """Every head at several lengths against plain decoding, at every temperature."""
    source = _source()
    screen = console()
    ways = (PLAIN, *(listed(draftings) or _found(out)))
    material = Prompts(bf16_folder(source))
    content: dict[str, Any] = {
        "model": source.name,
        "max_tokens": max_tokens,
        "heads": _heads(out),
        "runs": [],
    }
    for form in listed(weights):
        target = bf16_folder(source) if form == "BF16" else converted(source, form)
        load = {
            "draft": None,
            "threads": threads,
            "max_model_len": MAX_MODEL_LEN,
            "target": str(target),
            "draftings": ways,
            "runtime": "auto",
            "dtype": "auto",
        }
        PEERS.mkdir(exist_ok=True)
        with (PEERS / "real-heads.worker.log").open("w") as log:
            worker = Worker(Engine("outrider", form), load, log)  # type: ignore[arg-type]
            try:
                for category in listed(categories):
                    for number, prompt in enumerate(material.of_category(category, prompts)):
                        for temperature in map(float, listed(temperatures)):
                            for way in ways[:: 1 if number % 2 == 0 else -1]:
                                worker.use(way)
                                run = worker.run(
                                    prompt, max_tokens, temperature=temperature, seed=number
                                )
                                cell = {
                                    "weights": form,
                                    "category": category,
                                    "temperature": temperature,
                                    "prompt": number,
                                }
                                content["runs"].append(
                                    {**cell, "drafting": _named(way), **stored(run, len(prompt))}
                                )
                    screen.print(f"{form}: {category}")
            finally:
                worker.close()
    if store:
        screen.print(f"written to benchmarks/results/{write_result(NAME, content, threads).name}")
    show(content)


@app.command()
def render(file: Annotated[Path, typer.Argument(dir_okay=False)]) -> None:
    """The tables of a stored result."""
    show(read_result(file))


def show(content: dict[str, Any]) -> None:
    """A table for each format and temperature: speed over plain decoding's, and tau."""
    screen = console()
    runs = content["runs"]
    for form, temperature in dict.fromkeys((run["weights"], run["temperature"]) for run in runs):
        cells = [run for run in runs if (run["weights"], run["temperature"]) == (form, temperature)]
        columns = list(dict.fromkeys(run["category"] for run in cells))
        table = Table(
            "",
            *columns,
            "all",
            title=f"{form}, T = {temperature:g}: times plain decoding, median over prompts (tau)",
        )
        for way in dict.fromkeys(run["drafting"] for run in cells):
            table.add_row(way, *(_cell(cells, way, column) for column in (*columns, None)))
        screen.print(table)
    same = [
        run["text"] == other["text"]
        for run in runs
        if run["temperature"] == 0 and (other := _plain(runs, run))
    ]
    screen.print(f"greedy texts equal to plain decoding's: {sum(same)} of {len(same)}")
    busy = sum(run["other_cpu"] > 0.1 for run in runs)
    screen.print(
        f"{busy} of {len(runs)} runs beside processes that used more than 10% of the processors"
    )


def _cell(runs: list[dict[str, Any]], way: str, category: str | None) -> str:
    own = [run for run in runs if run["drafting"] == way and category in (None, run["category"])]
    if way == PLAIN:
        return f"{median(run['tokens_per_s'] for run in own):.0f} tokens/s"
    ratios = [
        run["tokens_per_s"] / plain["tokens_per_s"] for run in own if (plain := _plain(runs, run))
    ]
    return f"{median(ratios):.2f} ({mean(run['tau'] for run in own):.2f})"


def _plain(runs: list[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any] | None:
    """Plain decoding of the same prompt; None for plain runs themselves."""
    keys = ("weights", "category", "temperature", "prompt")
    same = (
        one
        for one in runs
        if one["drafting"] == PLAIN and all(one[key] == run[key] for key in keys)
    )
    return None if run["drafting"] == PLAIN else next(same, None)


def _source() -> Path:
    source = gguf_file(MODEL)
    if source is None:
        raise typer.BadParameter(f"no GGUF file at {MODEL}")
    return source


def _found(out: Path) -> list[str]:
    """The ways of drafting with every head in `out`."""
    heads = {kind: head for kind in SETTINGS if (head := _head(out, kind)).is_dir()}
    ways = [f"{kind} head={head} {how}" for kind, head in heads.items() for how in DRAFTINGS[kind]]
    return [*ways, *([f"{BESIDE_LOOKUPS}{heads['eagle3']}"] if "eagle3" in heads else [])]


def _head(out: Path, kind: str) -> Path:
    return out.resolve() / kind / "drafter"


def _named(way: str) -> str:
    """Without the folder of the head."""
    words = (re.sub(r";\w+\.head=.*", "", word) for word in way.split())
    return " ".join(word for word in words if not word.startswith("head="))


def _heads(out: Path) -> dict[str, Any]:
    """How each head was trained: settings, texts, learning curve. From the runs' own results, where
    they are finished."""
    found = {}
    for kind in SETTINGS:
        path = out / kind / "result.json"
        if path.exists():
            result = read_result(path)
            kept = (
                "recipe",
                "config",
                "settings",
                "num_train",
                "num_held_out",
                "num_train_tokens",
                "num_trained_parameters",
                "drafter_bytes",
                "steps",
                "seconds",
                "best_step",
                "curve",
                "losses",
                "calibration",
            )
            found[kind] = {name: result[name] for name in kept}
    return found


def _train(kind: str, target: Path, folder: Path, threads: int, *more: str) -> None:
    resume = ["--resume"] if (folder / "config.json").exists() else []
    command = [
        sys.executable,
        "-m",
        "outrider",
        "train",
        kind,
        "--target",
        str(target),
        "--out",
        str(folder),
    ]
    _run([*command, "--threads", str(threads), *more, *resume])


def _run(command: list[str]) -> None:
    code = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=False
    ).returncode
    if code:
        raise typer.Exit(code)


if __name__ == "__main__":
    app()
