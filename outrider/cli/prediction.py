"""`--prediction FILE`: the answer that is expected, and who drafts from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import ModelOptions
from outrider.errors import ConfigError

PARTS = ("parts=draft-model,prediction", "mode=best")  # of a composite that goes on with a draft model where the prediction ends
PredictionFile = Annotated[
    Path | None,
    typer.Option(
        help="What the answer is expected to be, like the file to be edited: drafted from where it comes true. The answer does "
        "not depend on it. Drafter: prediction, with --draft a composite of both.",
        metavar="FILE",
        show_default=False,
    ),
]


def with_prediction(target: str, model: ModelOptions) -> ModelOptions:
    """The options with a drafter that looks at a prediction, where none was named. Raises ConfigError for one that does not,
    before any model is read."""
    if model.drafter == "auto" and model.settings is None:
        model = _beside_a_draft(model) if model.draft is not None else dataclasses.replace(model, drafter="prediction")
    from outrider.build import Options, choose

    _, parts = choose(Options(target, **model.llm_arguments()))
    if not parts.requirements.prediction:
        raise ConfigError(
            f"drafter '{parts.drafter_name}' does not look at a prediction: leave --drafter out, or use --drafter prediction, or "
            "composite with it among the parts."
        )
    return model


def _beside_a_draft(model: ModelOptions) -> ModelOptions:
    return dataclasses.replace(model, drafter="composite", drafter_option=[*PARTS, *(model.drafter_option or [])])
