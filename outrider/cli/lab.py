"""Helpers that the lab's verbs share: a progress bar with the time left, and where a result goes.

--out FILE.json  the result             --out FILE.html  the report, one page that needs no network
--out FILE.md    the report, as text    --json           the result on standard output, and nothing else there
--out FOLDER     of `bench`: the files that NVIDIA's specdec_bench writes
"""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from outrider.cli.options import Json
from outrider.cli.session import quieten_libraries
from outrider.cli.typed import check_file, check_folder
from outrider.cli.verbs import listed, option
from outrider.errors import ConfigError
from outrider.lab.journal import claimed
from outrider.lab.progress import Lines, Progress

if TYPE_CHECKING:
    from outrider.lab.result import Result
    from outrider.report.document import Document

R = TypeVar("R", bound="Result")
OUTPUT = "Output"
INTERRUPTED = 130  # exit code after Ctrl-C

REPORTS = (".html", ".md")
Resume = Annotated[bool, listed(OUTPUT, "Continue an interrupted run.", common=True)]
Reports = Annotated[
    list[Path] | None,
    listed(
        OUTPUT,
        "Write the report as a page to be read offline (.html) or as text (.md); may be given "
        "again.",
        metavar="FILE.{html,md}",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options that say where a result and its reports are written."""

    out: list[Path] | None = option(
        None,
        OUTPUT,
        "Write the result (.json) or its report (.html, .md); may be given again.",
        metavar="FILE.{json,html,md}",
        common=True,
    )
    json: Json = False

    def files(self, *suffixes: str) -> list[Path]:
        """The files of --out whose names end in one of these suffixes."""
        return [path for path in self.out or [] if path.suffix in suffixes]

    @property
    def folders(self) -> list[Path]:
        """The folders of --out."""
        return [path for path in self.out or [] if not path.suffix or path.is_dir()]

    def check(self, *suffixes: str, folder: bool = False) -> None:
        """Before hours of work: files that could not be written, or with another suffix; `folder`:
        a folder is allowed, too. Raises ConfigError."""
        allowed = suffixes or (".json", *REPORTS)
        for path in self.out or []:
            if folder and path in self.folders:
                check_folder(path)
                continue
            check_file(path)
            if path.suffix not in allowed:
                more = ", or a folder" if folder else ""
                raise ConfigError(
                    f"--out writes {', '.join(allowed[:-1])} or {allowed[-1]}, by the name's end"
                    f"{more}; got '{path}'"
                )


def deliver(result: Result, output: OutputOptions) -> None:
    """Write and print everything that was asked for."""
    from outrider.lab.bench.bench_result import BenchResult
    from outrider.report.render import render
    from outrider.report.specdec import write_folder

    for path in output.files(".json"):
        result.write(path)
    if output.folders:
        assert isinstance(result, BenchResult)  # only `bench` takes a folder: `OutputOptions.check`
        for folder in output.folders:
            write_folder(result, folder)
    if output.json:
        sys.stdout.write(result.model_dump_json() + "\n")
    show(render(result), output)


def show(document: Document, output: OutputOptions) -> None:
    """Write a report to its files, print it unless the result was, and say what is written."""
    from outrider.report.console import print_document
    from outrider.report.markdown import to_markdown

    for path in output.files(*REPORTS):
        if path.suffix == ".html":
            from outrider.report.html import to_html  # with what draws plots

            text = to_html(document)
        else:
            text = to_markdown(document)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    if not output.json:
        print_document(document)
    for path in output.out or []:
        sys.stderr.write(f"written: {path}\n")


def answer(
    output: OutputOptions,
    run: Callable[[Progress], R],
    finish: Callable[[R], int] = lambda result: 0,
    *,
    journal: Path | None = None,
) -> int:
    """Run a measurement, show and write its result; the exit code, of a whole one that of `finish`.
    `journal`: where it keeps what is finished, until all is."""
    quieten_libraries()
    try:
        with shown_progress() as progress:
            result = run(progress)
    except KeyboardInterrupt:
        return _interrupted(journal)
    deliver(result.model_copy(update={"command": command_line()}), output)
    if result.interrupted:
        return _interrupted(journal)
    code = finish(result)
    if journal is not None:
        journal.unlink(missing_ok=True)
    return code


def measure(
    verb: str,
    output: OutputOptions,
    run: Callable[..., R],
    *,
    resume: bool,
    finish: Callable[[R], int] = lambda result: 0,
) -> int:
    """`answer` of a measurement that can be resumed: `run(path, resume=..., progress=...)` keeps
    what is finished in a file."""
    path = journal_path(output, verb, resume=resume)
    with claimed(path):
        if path.exists() and not resume:
            sys.stderr.write(
                f"note: {path} of an interrupted run is begun anew (--resume would have continued "
                "it)\n"
            )
        return answer(
            output,
            lambda progress: run(path, resume=resume, progress=progress),
            finish,
            journal=path,
        )


def _interrupted(journal: Path | None) -> int:
    """After Ctrl-C: says what is kept; the exit code."""
    saved = (
        f"; what is finished is in {journal}: the same command with --resume continues"
        if journal is not None and journal.exists()
        else ""
    )
    sys.stderr.write(f"interrupted{saved}\n")
    return INTERRUPTED


def journal_path(output: OutputOptions, verb: str, *, resume: bool) -> Path:
    """The file that an interrupted run leaves: by the name of the result, else of the first report,
    else in the current folder.

    A run that is resumed may have had fewer files: it is looked for under all of these names.
    """
    files = [*output.files(".json"), *output.files(*REPORTS), Path(f"outrider-{verb}")]
    paths = [file.with_name(f"{file.stem}.unfinished.jsonl") for file in files]
    left = [path for path in paths if resume and path.exists()]
    return next(iter(left), paths[0])


def command_line() -> str:
    """The command line as typed, for the result: it can be pasted."""
    return shlex.join(["outrider", *sys.argv[1:]])


@contextlib.contextmanager
def shown_progress() -> Iterator[Progress]:
    """A bar on stderr, with the time left; where stderr is no terminal, lines now and then."""
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _TimeLeft(),
    )
    with contextlib.redirect_stdout(sys.stderr):
        if not console.is_terminal:
            yield Lines(lambda line: console.print(line, markup=False, soft_wrap=True))
            return
        with Bars(*columns, console=console, speed_estimate_period=600) as bars:
            yield Bar(bars)


class _TimeLeft(ProgressColumn):
    """The time left as the pace so far forecasts it, at most what the stage may take."""

    def render(self, task: Task) -> Text:
        longest = max(task.fields["max_s"] - (task.elapsed or 0.0), 0.0)
        left = longest if task.time_remaining is None else min(task.time_remaining, longest)
        return Text(
            "-:--:--" if math.isinf(left) else str(timedelta(seconds=int(left))),
            style="progress.remaining",
        )


class Bar(Progress):
    """One rich bar per stage."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def stage(self, name: str, total: int, max_s: float = math.inf) -> None:
        self._end()
        self._task = self._bars.add_task(name, total=total, max_s=max_s)

    def advance(self, units: int = 1) -> None:
        if self._task is not None:
            self._bars.advance(self._task, units)

    def skip(self, units: int) -> None:
        if self._task is not None:  # the clock begins anew, and with it the pace
            self._bars.reset(self._task, completed=int(self._bars.tasks[-1].completed) + units)

    def say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, soft_wrap=True)

    def _end(self) -> None:
        """The last stage is over, whether or not all of its units came."""
        if self._task is not None:
            self._bars.remove_task(self._task)
