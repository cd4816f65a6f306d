"""`examples/outrider-phrases`, a drafter in a package of its own, does what docs/add-a-drafter.md
says.

The package is not installed, since that needs a network: what an installer would leave behind (the
modules, and beside them the metadata that names the entry points of pyproject.toml) is laid out in
a folder on the path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.cli.app import run
from outrider.drafters import DRAFTERS
from outrider.errors import ConfigError
from outrider.outputs import Completion
from outrider.parts import choose_parts
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "examples" / "outrider-phrases"
PAGE = REPOSITORY / "docs" / "add-a-drafter.md"
TIMEOUT_S = 240


def lay_out(site: Path, entry_points: dict[str, str] | None = None) -> Path:
    """What `pip install` leaves in site-packages. `entry_points`: others than those of
    pyproject.toml."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    points = entry_points or project["entry-points"]["outrider.drafters"]
    shutil.copytree(PACKAGE / "src", site, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = site / f"outrider_phrases-{project['version']}.dist-info"
    metadata.mkdir()
    lines = [f"{key}: {project[key.lower()]}" for key in ("Name", "Version")]
    (metadata / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))
    (metadata / "entry_points.txt").write_text(
        "\n".join(
            ["[outrider.drafters]", *(f"{name} = {value}" for name, value in points.items()), ""]
        )
    )
    return site


def run_with(
    site: Path, *arguments: str, cwd: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own that finds the package, and Outrider as it is here."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(REPOSITORY)])},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, found by this process too."""
    site = lay_out(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "outrider_phrases", raising=False)
    return site


def test_ls_lists_it_as_third_party(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an entry point group, module or class that pyproject.toml names wrongly."""
    assert run(["ls", "drafters", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["drafters"]
    row = next(row for row in rows if row["name"] == "phrases")
    assert row["summary"] == "third party, from outrider-phrases"
    assert (row["lossless"], row["shape"]) == (True, "chain or tree")
    assert set(row["settings"]) == {"file", "min_match", "tree"}
    assert "error" not in row


def test_a_model_decodes_with_it(tmp_path: Path, installed: Path) -> None:
    """Catches an interface that the built-in drafters use differently from what the page says: text
    and use of its drafts."""
    model = save_checkpoint(tmp_path / "target", tiny_llama(40, sharpness=2.0), word_tokenizer(40))
    phrases = tmp_path / "phrases.txt"
    params = SamplingParams(max_tokens=40)
    prompts = ["w3 w1", "w2 w5 w8", "w4"]

    def answers(**options: Any) -> list[Completion]:
        quiet = {"dtype": "float32", "runtime": "eager", "threads": 1}
        return LLM(model, **options, **quiet).generate(prompts, params)

    plain = answers(drafter="none")
    phrases.write_text("\n".join(done.text for done in plain))
    for tree in (False, True):
        done = answers(drafter="phrases", drafter_options={"file": str(phrases), "tree": tree})
        assert [one.token_ids for one in done] == [one.token_ids for one in plain]
        assert sum(one.stats.accepted for one in done) > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"file": "/no/such/file"}, "one phrase a line; '/no/such/file': .*No such file"),
        ({"files": "a.txt"}, "drafter 'phrases' has no option 'files'. Did you mean 'file'"),
        (
            {"min_match": "some"},
            "drafter 'phrases': min_match must be a whole number, got 'some'",
        ),
        ({"min_match": "0"}, r"min_match must be at least 1 \(.*, got 0"),
    ],
)
def test_its_settings_are_checked_before_a_model_is_read(
    installed: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_parts("phrases", options, "auto", {}, None, lossy=False)


def test_its_settings_choose_verifier_and_length(installed: Path) -> None:
    """Catches class methods of the base that only built-in drafters can reach."""
    chain, tree = (
        choose_parts("phrases", {"tree": on}, "auto", {}, None, lossy=False) for on in (False, True)
    )
    assert (chain.verifier.name, chain.length.max_nodes, chain.requirements.trees) == (
        "block",
        8,
        False,
    )
    assert (tree.verifier.name, tree.length.max_nodes, tree.requirements.trees) == (
        "traversal",
        16,
        True,
    )


def test_a_name_that_a_built_in_has_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's package may silently become another drafter."""
    monkeypatch.syspath_prepend(
        str(lay_out(tmp_path / "site", {"ngram": "outrider_phrases:PhraseDrafter"}))
    )
    with pytest.raises(
        ConfigError, match="'ngram' from outrider_phrases:PhraseDrafter clashes with the built-in"
    ):
        DRAFTERS.load("ngram")


def test_a_module_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(
        str(lay_out(tmp_path / "site", {"phrases": "outrider_phrase:PhraseDrafter"}))
    )
    with pytest.raises(
        ConfigError, match=r"drafter 'phrases' \(outrider_phrase:PhraseDrafter\) cannot be imported"
    ):
        DRAFTERS.load("phrases")


@pytest.mark.slow
def test_its_own_tests_pass(tmp_path: Path) -> None:
    """As the page says: in the folder of the package."""
    result = run_with(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", cwd=PACKAGE)
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_the_contract_suite_takes_it(tmp_path: Path) -> None:
    """Whoever registers a drafter gets the whole suite over it."""
    suite = [
        "tests/contract/test_drafters.py",
        "-k",
        "phrases",
        "-m",
        "not slow and not nightly",
        "-p",
        "no:cacheprovider",
    ]
    result = run_with(lay_out(tmp_path / "site"), "-m", "pytest", *suite)
    assert result.returncode == 0, result.stdout
    assert int(re.findall(r"(\d+) passed", result.stdout)[-1]) > 5


def test_the_page_shows_the_code_of_the_package() -> None:
    """Catches a page that was left behind: every Python and TOML block on it is a piece of the
    package."""
    sources = [path.read_text() for path in (PACKAGE / "pyproject.toml", *PACKAGE.rglob("*.py"))]
    blocks = re.findall(
        r"^```(?:python|toml)\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert len(blocks) > 5
    for block in blocks:
        assert any(block in source for source in sources), block
