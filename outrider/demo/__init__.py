"""The embedded demo pair: a 14M-parameter target and a 1.2M draft that solve graded word problems.

Where the weights are, and six prompts they were not trained on; the workload `demo` has more of
them. `tools/demo_models` makes the problems and has the recipe that the pair was trained with;
`models/README.md` is the model card. Importing this loads neither torch nor transformers.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from outrider.demo.packed import with_weights


class DemoPaths(NamedTuple):
    target: Path
    draft: Path


def demo_paths() -> DemoPaths:
    """The folders of the embedded pair, each readable by transformers' `from_pretrained`.

    In a checkout the first call unpacks the target's weights: beside the packed ones, or in a
    temporary folder where that place cannot be written. Raises CheckpointError where neither is
    possible.
    """
    models = Path(__file__).parent / "models"
    return DemoPaths(with_weights(models / "target"), models / "draft")


@cache
def demo_template() -> str:
    """The chat template of the embedded pair: a model that has it is the demo, by whatever name or
    from whatever folder."""
    file = Path(__file__).parent / "models" / "target" / "chat_template.jinja"
    return file.read_text(encoding="utf-8")


def demo_heads() -> dict[str, Path]:
    """The folders of the embedded heads, by the drafter that drafts with them; packed weights are
    unpacked as `demo_paths` does."""
    return {folder.name: with_weights(folder) for folder in _head_folders()}


def demo_head(drafter: str) -> Path | None:
    """The folder of the embedded head that this drafter drafts with; None where there is none."""
    folder = next((folder for folder in _head_folders() if folder.name == drafter), None)
    return None if folder is None else with_weights(folder)


def _head_folders() -> list[Path]:
    heads = Path(__file__).parent / "models" / "heads"
    return sorted(heads.glob("*/")) if heads.is_dir() else []


DEMO_PROMPTS: tuple[str, ...] = (
    "Question: Sam has 37 lemons and James has 18 lemons. How many more lemons does Sam have?\nAnswer:",
    "Question: A box holds 11 pink books and 18 blue books. How many books does the box hold?\nAnswer:",
    (
        "Question: Nina starts with 15 apples. Max gives Nina 17 more apples. She sells 14 of the apples. "
        "How many apples does Nina have now?\nAnswer:"
    ),
    (
        "Question: Ben has $11. He buys a scarf for $5 and a plate for $2. How much money does he have "
        "left?\nAnswer:"
    ),
    (
        "Question: James picks 18 eggs in the morning and 2 in the evening. 8 eggs are bad. The others go "
        "into 3 equal packets. How many eggs does each packet hold?\nAnswer:"
    ),
    (
        "Question: Leah buys 3 hats for $2 each and a bag for $17. She pays with $36. How much change does "
        "she get?\nAnswer:"
    ),
)  # held-out split; answers 19, 29, 18, 4, 4, 13

__all__ = ["DEMO_PROMPTS", "DemoPaths", "demo_head", "demo_heads", "demo_paths", "demo_template"]
