"""Study `quick`: what `outrider train eagle3 --quick` trains in minutes, for those who want to know
before they start it."""

from __future__ import annotations

from outrider.lab.result import read_result
from outrider.train.train_result import TrainResult
from study.common import WORK, curve, outrider, saved


def run_quick() -> None:
    """Run the command, unless that was done, and write the result."""
    out = WORK / "quick"
    if not (out / "result.json").exists():
        resume = ["--resume"] if (out / "config.json").exists() else []
        outrider("train", "eagle3", "--quick", "--target", "demo", "--out", out, *resume)
    result = read_result(out / "result.json")
    assert isinstance(result, TrainResult)
    saved(
        "quick",
        {
            "settings": {"epochs": result.config["epochs"]},
            "curves": {"eagle3": curve(result)},
            "measured": [one.model_dump() for one in result.measured],
        },
    )
