"""Settings files: written by `tune`, read by `generate` and `chat`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.options import ModelOptions
from outrider.errors import ConfigError
from outrider.settings_file import SettingsFile, read_settings

OPTIONS = {"drafter": "suffix", "num_draft_tokens": 6, "drafter_options": {"max_depth": 32}}
WHOLE = SettingsFile(
    "demo", OPTIONS, {"code": {"drafter": "ngram"}}, {8: {"drafter": "none"}}, "measured"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.json"
    WHOLE.write(path)
    return path


def test_what_is_written_is_read(file: Path) -> None:
    """Guards against keys that only one side knows; row counts are numbers again."""
    assert read_settings(file) == WHOLE


def test_options_of_the_file_are_used(file: Path) -> None:
    arguments = ModelOptions(settings=file).llm_arguments()
    assert {name: arguments[name] for name in OPTIONS} == OPTIONS
    assert "settings" not in arguments


def test_options_given_win(file: Path) -> None:
    arguments = ModelOptions(
        settings=file, num_draft_tokens="3", drafter="suffix max_depth=8 alpha=2"
    ).llm_arguments()
    assert arguments["num_draft_tokens"] == "3"
    assert arguments["drafter_options"] == {"max_depth": "8", "alpha": "2"}


def test_two_drafters_are_refused(file: Path) -> None:
    """Half of the file's options would be about another drafter."""
    with pytest.raises(ConfigError, match="leave one out"):
        ModelOptions(settings=file, drafter="ngram").llm_arguments()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no settings file"),
        (
            '{"schema_version": 1, "kind": "tune"}',
            "is a result: --settings takes the file .* --settings-out",
        ),
        ('{"outrider_settings": 2, "options": {}}', "no settings file of this version"),
        ('{"outrider_settings": 1}', "'options' must be an object"),
        ('{"outrider_settings": 1, "options": {"drafer": "x"}}', "Did you mean 'drafter'"),
        ('{"outrider_settings": 1, "options": {}, "for_batch_sizes": {"many": {}}}', "row counts"),
        ('{"outrider_settings": 1, "options": {}, "for_tasks": ["code"]}', "map names"),
    ],
)
def test_bad_files_teach(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_settings(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        read_settings(tmp_path / "nowhere.json")


def test_the_file_is_plain_json(file: Path) -> None:
    assert json.loads(file.read_text())["options"] == OPTIONS
