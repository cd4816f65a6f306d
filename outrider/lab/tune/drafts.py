"""The drafts that `--draft` names to `tune`, once or several times: a draft model, and heads
trained for this target.

They are distinguished by their files, weights by their headers alone. Heads that come with the
target (the demo's, the MTP head of a checkpoint) take part without being named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.build import DEMO, Options, embedded_heads, target_config
from outrider.errors import ConfigError
from outrider.lab.tune.space import TrainedHead
from outrider.models.heads.block_files import load_block
from outrider.models.heads.eagle_files import TargetSizes, load_eagle
from outrider.models.heads.kinds import ACCEPTANCE, head_kind
from outrider.models.heads.medusa import load_medusa
from outrider.models.heads.mtp_files import num_mtp_layers
from outrider.models.heads.on_hub import fetched_head
from outrider.models.source import resolve

MODEL = "draft-model"
# what no option's value can hold in a configuration's text form (configuration.py)
NO_NAME = " \t\n,+;"


@dataclass(frozen=True)
class Drafts:
    """All that may draft alongside what needs nothing."""

    model: str | None  # the draft model; None: none, or the one that comes with the target
    heads: tuple[TrainedHead, ...] = ()


def read_drafts(options: Options, more: Sequence[str] = ()) -> Drafts:
    """`options.draft` and `more`, sorted by kind.

    Raises ConfigError for two draft models or a folder whose name no configuration can hold,
    CheckpointError for a head that was not made for this target.
    """
    named = list(dict.fromkeys(fetched_head(name) for name in (options.draft, *more) if name))
    embedded = embedded_heads(options.target, options.device)
    kinds = {name: kind_of(name) for name in named}
    models = [name for name in named if kinds[name] == MODEL]
    folders = [name for name in named if kinds[name] != MODEL]
    if len(models) > 1:
        raise ConfigError(
            f"one draft model at a time, got {' and '.join(models)}: tune with each, then outrider "
            "report ONE.json OTHER.json. Heads can be as many as you like"
        )
    _check_names(folders)
    if not (folders or embedded):
        return Drafts(next(iter(models), None))
    sizes = TargetSizes.of(target_config(options))
    heads = [_head(kind, folder, "", sizes) for kind, folder in embedded.items()]
    heads += [_head(kinds[folder], folder, folder, sizes) for folder in folders]
    lonely = next((head.folder for head in heads if head.kind == ACCEPTANCE), None)
    if lonely is not None and not models and options.target != DEMO:
        raise ConfigError(
            f"'{lonely}' ends the drafts of a draft model: name that, too, with another --draft"
        )
    return Drafts(next(iter(models), None), tuple(heads))


def kind_of(name: str) -> str:
    """MODEL, ACCEPTANCE, or the name of the drafter that drafts with it. Raises CheckpointError for
    files that cannot be read."""
    folder = Path(name)
    if name == DEMO or not folder.exists():
        return MODEL  # the demo's, a hub id; or nothing, which loading will say
    # a folder without weights is reported when it is loaded
    return head_kind(resolve(name)) or MODEL


def _head(kind: str, path: str, folder: str, sizes: TargetSizes) -> TrainedHead:
    """`path`: where it lies; `folder`: what options call it."""
    if kind == "medusa":
        num_heads = load_medusa(path, sizes.hidden_size, sizes.vocab_size, outline=True).num_heads
        return TrainedHead(kind=kind, folder=folder, max_chain=num_heads)
    if kind == "block":
        config = load_block(
            path, sizes.hidden_size, sizes.vocab_size, sizes.num_layers, outline=True
        ).config
        return TrainedHead(
            kind=kind,
            folder=folder,
            max_chain=config.num_guesses,
            confidence=config.confidence,
            markov=bool(config.markov_rank),
        )
    if kind == "mtp":
        layers = num_mtp_layers(resolve(path), sizes.num_layers)
        return TrainedHead(kind=kind, folder=folder, max_chain=layers if layers > 1 else None)
    if kind in ("eagle", "eagle3"):
        # refuses one that does not fit
        eagle = load_eagle(path, "eagle3" if kind == "eagle3" else "eagle", sizes, outline=True)
        return TrainedHead(kind=kind, folder=folder, masked=eagle.config.mask_token is not None)
    return TrainedHead(kind=kind, folder=folder)


def _check_names(folders: Sequence[str]) -> None:
    for folder in folders:
        if wrong := sorted(set(folder) & set(NO_NAME)):
            raise ConfigError(
                f"the folder name '{folder}' has {' '.join(map(repr, wrong))} in it, which no "
                "configuration can hold: rename it, or give a link to it"
            )
