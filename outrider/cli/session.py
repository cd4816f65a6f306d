"""Opening a model for a verb: libraries quietened, progress shown on stderr, nothing of it on
stdout."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outrider import collector
from outrider.cli.options import ModelOptions
from outrider.report.text import printable
from outrider.settings_file import read_settings

if TYPE_CHECKING:
    from outrider.llm import LLM

AUTO = "auto"  # of --drafter, and of --draft


def load_llm(
    target: str, options: ModelOptions, generation_config: str = "none", *, notes: bool = True
) -> LLM:
    """The model, ready. `notes`: say how it runs. Raises the library's errors as they are."""
    with progress(f"starting {target}") as status, collector.paused():
        from outrider.llm import LLM

        quieten_libraries()
        llm = LLM(
            target, **options.llm_arguments(), generation_config=generation_config, status=status
        )
    _check_settings(target, options)
    for note in llm.notes if notes or options.draft == AUTO else ():
        say(f"note: {note}")
    _offer(target, options, llm)
    return llm


def _offer(target: str, options: ModelOptions, llm: LLM) -> None:
    """Tell a person at a terminal of the drafter that was made for this target, where nobody said
    who drafts and earlier text does."""
    chosen = (options.draft, options.draft_endpoint, options.settings)
    is_open = options.drafter == AUTO and all(one is None for one in chosen)
    if not (sys.stderr.isatty() and is_open and llm.config["drafter"] == "suffix"):
        return
    from outrider.drafters.companions import offer

    if (line := offer(target)) is not None:
        say(f"note: {line}", dim=True)


def _check_settings(target: str, options: ModelOptions) -> None:
    """Settings for another target work, but what they promise was measured elsewhere."""
    if (
        options.settings is not None
        and (made_for := read_settings(options.settings).target) != target
    ):
        say(
            f"note: {options.settings} was tuned for {made_for or 'an unnamed target'}, not for "
            f"{target}"
        )


@contextlib.contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done: a spinner on a terminal, lines elsewhere; always on
    stderr.

    Whatever a library prints meanwhile goes to stderr too: stdout belongs to the answer.
    """
    console = Console(stderr=True, highlight=False)
    with contextlib.redirect_stdout(sys.stderr):
        if not console.is_terminal:
            yield lambda line: console.print(line, markup=False, soft_wrap=True)
            return
        with console.status(_dim(first)) as spinner:
            yield lambda line: spinner.update(_dim(line))


def say(line: str, *, dim: bool = False) -> None:
    """Write a line on stderr, on a terminal broken between words."""
    if sys.stderr.isatty():
        Console(stderr=True, highlight=False).print(Text(line, "dim" if dim else ""))
    else:
        sys.stderr.write(f"{line}\n")


def say_facts(facts: Mapping[str, str]) -> None:
    """Write names and what they stand for on stderr, in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, meaning in facts.items():
        table.add_row(Text(name), Text(printable(meaning)))
    Console(stderr=True, highlight=False).print(table)


def _dim(line: str) -> str:
    return f"[dim]{escape(line)}[/dim]"


def quieten_libraries() -> None:
    """Their warnings are for programmers; what a user must know becomes one of our errors."""
    # read where they are imported
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
