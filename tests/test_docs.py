"""What the documentation names exists: links, anchors, files, commands with their options,
settings, variables.

Pages are read as text. A page that was left behind by a change of the code is found here, not by
its first reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from outrider.cli.app import build_app
from outrider.cli.borrowed import SAME, SPECULATIVE
from outrider.cli.train import OFTEN_SET
from outrider.drafters import DRAFTERS
from outrider.engine.request import EngineSettings
from outrider.models.gguf.architectures import ARCHITECTURES
from outrider.registry import Registry
from outrider.serve.api.reasoning_formats import NAMES
from outrider.serve.rules import Rule
from outrider.settings import describe_settings
from outrider.train.config import CONFIG_FIELDS
from outrider.train.kinds import KINDS
from outrider.verifiers import VERIFIERS

ROOT = Path(__file__).resolve().parent.parent
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
OURS = (*TOP, "docs/**/*.md", "benchmarks/*.md", "examples/*/*.md", "outrider/demo/models/**/*.md")
PAGES = sorted({page for pattern in OURS for page in ROOT.glob(pattern)})
LINK = re.compile(r"\[(?:[^][]|\[[^]]*\])*\]\(([^()\s]+)\)")
SPAN = re.compile(r"``(.+?)``|`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FOLDERS = ("outrider", "tests", "docs", "benchmarks", "deploy", "examples")
OUR_FILE = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]+")
COMMAND = re.compile(r"(?<!from )\boutrider ((?:service )?[a-z]+)\b([^`\n]*)")
OPTION = re.compile(r"(?<![\w-])--(?:set [a-z]\w*|[a-z][a-z-]*)")  # a setting with its name
RESULT = re.compile(r"\b[a-z][a-z0-9-]*-\d{4}-\d\d-\d\d\.json(?:\.gz)?")
SOURCES = sorted(
    path for folder in ("outrider", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def text_of(page: Path) -> str:
    """With lines that end in a backslash joined to the next ones."""
    return page.read_text(encoding="utf-8").replace("\\\n", " ")


@cache
def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """(file, anchor) of every link that stays in the repository."""
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if "://" not in target and not target.startswith("mailto:"):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def spans(page: Path) -> Iterator[str]:
    """What stands between backticks, outside of code blocks."""
    for double, single in SPAN.findall(FENCE.sub("", text_of(page))):
        yield double or single


@cache
def known_options() -> dict[str, set[str]]:
    """Of each verb, and of each sub-command of a group: 'service draft'."""
    top: Any = typer.main.get_command(build_app())
    commands = dict(top.commands)
    for group, verb in top.commands.items():
        commands |= {
            f"{group} {name}": command for name, command in getattr(verb, "commands", {}).items()
        }
    return {
        name: {
            option
            for parameter in verb.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        | {"--help"}
        for name, verb in commands.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        f"{file}#{anchor}"
        for file, anchor in links(page)
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file))
    ]
    assert not broken


def test_every_page_can_be_reached_from_the_readme() -> None:
    """A page that nothing leads to is not read."""
    reached = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md" and page.is_file():
            reached.add(page)
            waiting.extend(file for file, _ in links(page))
    alone = sorted(name_of(page) for page in set(PAGES) - reached)
    assert not alone


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths from the top of the repository between backticks; stars may stand for several."""
    named = [
        path for span in spans(page) for path in OUR_FILE.findall(span) if span.startswith(FOLDERS)
    ]
    missing = [path for path in named if not any(ROOT.glob(path.rstrip("/.")))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_results_that_are_named_exist(page: Path) -> None:
    """By their dates: whoever doubts a number looks there."""
    assert not _missing_results(text_of(page))


def test_results_that_sources_name_exist() -> None:
    """A constant whose comment names a result was taken from there."""
    missing = {
        name_of(path): _missing_results(path.read_text(encoding="utf-8")) for path in SOURCES
    }
    assert not {path: names for path, names in missing.items() if names}


def _missing_results(text: str) -> list[str]:
    return sorted(
        name
        for name in {*RESULT.findall(text)}
        if not (ROOT / "benchmarks" / "results" / name).is_file()
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_options_exist(page: Path) -> None:
    """Whatever stands behind `outrider VERB` on a line of code or between backticks."""
    verbs = known_options()
    wrong = []
    for verb, rest in COMMAND.findall(
        "\n".join([*FENCE.findall(text_of(page)), *spans(page), *_indented(page)])
    ):
        if verb not in verbs:
            wrong.append(f"outrider {verb}")
        else:
            wrong += [
                f"outrider {verb} {option}"
                for option in OPTION.findall(rest)
                if option not in verbs[verb]
            ]
    assert not wrong


def _indented(page: Path) -> list[str]:
    """Lines of code blocks that are marked by four spaces."""
    return [line.strip() for line in text_of(page).splitlines() if line.startswith("    ")]


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
        if page.parent.name != "results"
    ],
    ids=name_of,
)
def test_options_in_passing_exist(page: Path) -> None:
    """An option alone between backticks is one of some verb."""
    known = set().union(*known_options().values())
    # of other programs
    strangers = {"--num_processes", "--rehearse", "--additional-config", *SAME, SPECULATIVE}
    named = {
        option for span in spans(page) if span.startswith("--") for option in OPTION.findall(span)
    }
    unknown = sorted(named - known - strangers)
    assert not unknown


def test_every_option_is_described() -> None:
    """As they are typed, on the page of some command, in code."""
    pages = {
        page
        for page in (ROOT / "docs").rglob("*.md")
        if page.parent.name not in ("results", "decisions")
    }
    text = "\n".join(
        part
        for page in pages
        for part in (*spans(page), *FENCE.findall(text_of(page)), *_indented(page))
    )
    options = {one for known in known_options().values() for one in known if one.startswith("--")}
    # one of both forms is enough
    switches = {name.replace("--no-", "--", 1) for name in options if name.startswith("--no-")}
    named = sorted(name for name in options - {"--help-of"} if not name.startswith("--no-"))
    hidden = []
    for name in named:
        forms = f"(no-)?{name[2:]}" if name in switches else name[2:]
        if not re.search(rf"(?<![\w-])--{forms}(?![\w-])", text):
            hidden.append(name)
    assert not hidden


def test_options_that_messages_name_exist() -> None:
    """In strings, comments and docstrings of the package; other programs' options stand where they
    are written for."""
    known = set().union(*known_options().values(), {"--help=all", "--version"})
    others = (
        "integrations",
        "lab/server",
        "lab/tune/launch_lines.py",
        "lab/workload/formats.py",
        "report/card.py",
        "lab/workload/published.py",
        "cli/borrowed.py",
        "cli/verbs.py",
        "demo",
    )
    unknown = {
        name_of(path): wrong
        for path in (ROOT / "outrider").rglob("*.py")
        if not str(path.relative_to(ROOT / "outrider")).startswith(others)
        and (wrong := sorted(set(OPTION.findall(path.read_text(encoding="utf-8"))) - known))
    }
    assert not unknown


def test_the_page_of_commands_names_every_verb() -> None:
    text = text_of(ROOT / "docs" / "commands.md")
    missing = [
        verb
        for verb in known_options()
        if " " not in verb and not re.search(rf"`(?:outrider )?{verb}\b", text)
    ]
    assert not missing


def pages_of_drafters() -> dict[str, Path]:
    """From the table of drafters."""
    docs = ROOT / "docs"
    rows = re.findall(r"^\| \[(`[^]]+)\]\(([^)]+)\)", text_of(docs / "drafters.md"), re.MULTILINE)
    return {name: docs / page for names, page in rows for name in re.findall(r"`([^`]+)`", names)}


def test_the_page_of_drafters_names_every_one() -> None:
    assert set(pages_of_drafters()) == set(DRAFTERS.names()) - {"none"}


def words_of(pages: set[Path]) -> set[str]:
    """All words between backticks or in code blocks."""
    code = [
        part
        for page in pages
        for part in (*spans(page), *FENCE.findall(text_of(page)), *_indented(page))
    ]
    return set(re.findall(r"\w+", " ".join(code)))


@pytest.mark.parametrize("name", sorted(set(DRAFTERS.names()) - {"none"}))
def test_settings_of_drafters_are_described(name: str) -> None:
    """On the drafter's page, or on one that it links to."""
    page = pages_of_drafters()[name]
    near = {
        page,
        *(
            file
            for file, _ in links(page)
            if file.suffix == ".md" and file.parent.name == "algorithms"
        ),
    }
    missing = sorted(_settings(DRAFTERS, name) - words_of(near))
    assert not missing


@pytest.mark.parametrize("page", sorted(set(pages_of_drafters().values())), ids=name_of)
def test_settings_in_tables_exist(page: Path) -> None:
    """A row of a table of settings names one that a drafter of that page has."""
    known = {
        setting
        for name, where in pages_of_drafters().items()
        if where == page
        for setting in _settings(DRAFTERS, name)
    }
    tables = re.findall(r"^\| setting \|.*\n\|[-|: ]+\n((?:\|.*\n)+)", text_of(page), re.MULTILINE)
    named = {
        name
        for table in tables
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert not named - known


@pytest.mark.parametrize("name", VERIFIERS.names())
def test_verifiers_and_their_settings_are_described(name: str) -> None:
    pages = set((ROOT / "docs" / "algorithms").glob("*.md"))
    assert any(re.search(rf"`(?:--verifier )?{name}`", text_of(page)) for page in pages)
    missing = sorted(_settings(VERIFIERS, name) - words_of(pages))
    assert not missing


@pytest.mark.parametrize("name", KINDS.names())
def test_settings_of_training_are_described(name: str) -> None:
    page = ROOT / "docs" / "train.md"
    typed = {
        f"--{field.replace('_', '-')}" if field in OFTEN_SET else field for field in CONFIG_FIELDS
    }
    missing = _settings(KINDS, name) - words_of({page})
    missing |= {option for option in typed if f"`{option}`" not in text_of(page)}
    assert not missing


def _settings(registry: Registry, name: str) -> set[str]:
    found: Any = registry.load(name).Settings
    return set(describe_settings(found))


def test_every_architecture_of_gguf_files_is_listed() -> None:
    """Whoever has a file looks for what it calls itself."""
    page = text_of(ROOT / "docs" / "checkpoints.md")
    assert not sorted(name for name in ARCHITECTURES if f"`{name}`" not in page)


def test_what_only_a_configuration_file_can_say_is_described() -> None:
    """No `--help` lists it."""
    words = words_of({ROOT / "docs" / "serve.md"})
    missing = sorted(
        {field.name for kind in (EngineSettings, Rule) for field in fields(kind)} - words
    )
    assert not missing


def test_names_of_reasoning_formats_are_listed() -> None:
    """`--reasoning-parser` takes them."""
    missing = sorted(set(NAMES) - words_of({ROOT / "docs" / "api.md"}))
    assert not missing


def test_every_alert_is_explained() -> None:
    """Whoever is woken up looks for its name."""
    alerts = re.findall(
        r"alert: (\w+)", (ROOT / "deploy" / "alerts.yaml").read_text(encoding="utf-8")
    )
    missing = sorted(set(alerts) - words_of({ROOT / "docs" / "serve.md"}))
    assert alerts
    assert not missing


def test_hints_install_from_a_checkout() -> None:
    """No package index has Outrider: `pip install 'outrider[serve]'` would fail, or bring somebody
    else's package."""
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in (*SOURCES, *PAGES)}
    assert not [name for name, text in texts.items() if re.search(r"\boutrider\[", text)]


def test_variables_that_are_named_are_read() -> None:
    """By the code, or by the files of `deploy/`."""
    files = [
        *(ROOT / "outrider").rglob("*.py"),
        *(file for file in (ROOT / "deploy").rglob("*") if file.is_file()),
    ]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    named = {name for page in PAGES for name in re.findall(r"\bOUTRIDER_[A-Z_]+", text_of(page))}
    unknown = sorted(name for name in named if name not in code)
    assert named
    assert not unknown
