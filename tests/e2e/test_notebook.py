"""The notebook runs from its first cell to its last, and what it shows when it is read without
running it is what it makes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"
MAX_BYTES = 200_000


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream")


def kinds(cell: Any) -> set[str]:
    """What a cell shows: MIME types, and "stream" for what it prints."""
    shown: set[str] = set()
    for out in cell.outputs:
        shown |= {"stream"} if out.output_type == "stream" else set(out.data)
    return shown


@pytest.mark.slow
def test_it_runs_and_shows_what_is_kept_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    kept = nbformat.read(NOTEBOOK, as_version=4)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
    for cell, before in zip(code_cells(notebook), code_cells(kept), strict=True):
        assert kinds(cell) == kinds(before), cell.source
    answer, drafts, *_ = code_cells(notebook)
    assert printed(answer) == printed(code_cells(kept)[0]), "greedy text, drafts and passes"
    assert "42" in printed(answer)
    assert printed(drafts) == printed(code_cells(kept)[1])


def test_it_can_be_read_without_running_it() -> None:
    """On a page that shows notebooks: text and pictures, small, and nothing of the machine."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(cell.outputs for cell in code_cells(notebook))
    assert sum("image/png" in kinds(cell) for cell in code_cells(notebook)) >= 2
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < MAX_BYTES
    assert "/work/" not in text
    assert "/root/" not in text
    assert '"output_type": "error"' not in text
