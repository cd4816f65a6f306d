"""Reports of every kind, word by word: `pytest tests/unit/report/test_golden.py --renew-golden`
writes them anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.lab.compare import compare
from outrider.lab.estimate.estimate import costs_of, estimate
from outrider.report import bench
from outrider.report import compare as comparison
from outrider.report.document import Document
from outrider.report.html import to_html
from outrider.report.markdown import to_markdown
from outrider.report.render import render
from tests.unit.report import results
from tests.unit.report.results import pinned

GOLDEN = Path(__file__).parent / "golden"


def compared() -> Document:
    old = pinned(results.bench(results.GAIN))
    slower = results.measured(1, results.interval(1.5, 1.45, 1.55), num_tokens=80)
    new = pinned(results.bench(results.cell(results.measured(0), slower), notes=["another note"]))
    return comparison.document(compare(old, new))


REPORTS: dict[str, Callable[[], Document]] = {
    "bench": lambda: render(pinned(results.bench(results.GAIN))),
    "bench-brief": lambda: bench.brief(pinned(results.bench(results.GAIN))),
    "bench-doubtful": lambda: render(pinned(results.doubtful_bench())),
    "bench-servers": lambda: render(
        pinned(results.bench(target=None, configurations=[], servers=results.compared_servers()))
    ),
    "certify": lambda: render(pinned(results.certificate())),
    "certify-failed": lambda: render(pinned(results.failed_certificate())),
    "certify-server": lambda: render(pinned(results.server_certificate())),
    "certify-server-failed": lambda: render(pinned(results.failed_server_certificate())),
    "compare": compared,
    "estimate": lambda: render(
        pinned(estimate([0.8], costs_of(0.1, {}), "c 0.1 and passes that cost the same"))
    ),
    "estimate-measured": lambda: render(pinned(results.estimated())),
    "explain": lambda: render(pinned(results.explanation())),
    "explain-lookup": lambda: render(pinned(results.greedy_lookup_explanation())),
    "replay": lambda: render(pinned(results.replay_result())),
    "train": lambda: render(pinned(results.train_result())),
    "tune": lambda: render(pinned(results.tune_result())),
}


@pytest.mark.parametrize("name", REPORTS)
def test_report(name: str, renew_golden: bool) -> None:
    document = REPORTS[name]()
    text = to_markdown(document)
    to_html(document)
    file = GOLDEN / f"{name}.md"
    if renew_golden:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), (
        "pytest --renew-golden writes it anew; then read the difference"
    )


def test_no_golden_file_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.glob("*.md")} == set(REPORTS)
