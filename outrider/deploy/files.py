"""Written files: comments first, then what a program reads."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from outrider.errors import ConfigError
from outrider.version import __version__

WIDTH = 118


class DeployFiles(dict[str, str]):
    """File name -> text, the main file first."""

    @property
    def main(self) -> str:
        """The text of the main file."""
        return next(iter(self.values()))

    def write(self, out: Path, *, as_folder: bool) -> list[Path]:
        """All of them into the folder `out`, made where it is missing, or the main one as the file `out`. Gives what was written;
        raises ConfigError."""
        try:
            if not as_folder:
                _write(out, self.main)
                return [out]
            out.mkdir(parents=True, exist_ok=True)
            for name, text in self.items():
                _write(out / name, text)
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
        return [out / name for name in self]


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    if text.startswith("#!"):
        path.chmod(path.stat().st_mode | 0o111)


def comment(lines: Iterable[str]) -> str:
    """Lines of '#' comments; a line break within one would end it."""
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def script(lines: Sequence[str], words: Sequence[Sequence[str]]) -> str:
    """A shell script that becomes the server; its own arguments go there, too."""
    command = " \\\n  ".join([*map(shlex.join, words), '"$@"'])
    return f"#!/bin/sh\n{comment([*lines, f'Written by outrider {__version__}.'])}exec {command}\n"


def as_yaml(lines: Sequence[str], *documents: Mapping[str, Any]) -> str:
    """Comments, then one YAML document for each mapping."""
    several = len(documents) > 1
    text = yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH, explicit_start=several
    )
    return comment([*lines, f"Written by outrider {__version__}."]) + text


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks that a person can read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
