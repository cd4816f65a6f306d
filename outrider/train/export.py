"""`outrider export`: a trained drafter in the layout that another program reads.

    kind                what it is                      layouts
    draft-model         a transformers folder           transformers
    medusa              Medusa heads                    medusa (medusa_lm_head.pt), vllm
    eagle, eagle3       EAGLE heads                     raw, speculators (eagle3), fp8
    block               DFlash / DSpark heads           raw, speculators
    early-exit, ...     ours alone: nobody reads them   none

The tensors and the config decide the kind, not names. Heads that share the target's tables are
written with them (`raw`, `speculators`, `vllm`), for engines that do not share; `fp8` is for
Outrider itself, small.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from outrider.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    OutriderError,
    did_you_mean,
)
from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.block_files import export_block, load_block
from outrider.models.heads.eagle import EagleConfig, EagleHead, Kind
from outrider.models.heads.eagle_files import TargetSizes, load_eagle
from outrider.models.heads.kinds import has_tokenizer, head_kind, how_to_draft
from outrider.models.heads.medusa import export_medusa, load_medusa
from outrider.models.heads.source import HeadSource, rounded_to_fp8
from outrider.models.loading.context import UNKNOWN_CONTEXT
from outrider.models.loading.load import load_config, load_module, load_tokenizer, own_dtype
from outrider.models.source import resolve
from outrider.train.checkpoint import why_unwritten
from outrider.train.export_draft import CPU, check_draft, export_draft
from outrider.train.export_eagle import FP8, export_eagle
from outrider.wellformed import load_object

Config = TypeVar("Config", BlockConfig, EagleConfig)
DRAFT_MODEL = "draft-model"
LAYOUTS = ("raw", "speculators", FP8, "medusa", "vllm", "transformers")


@dataclass(frozen=True)
class Target:
    """The sizes that heads are exported for and checked against."""

    name: str  # a folder or a hub id
    module: Any
    tokenizer: Any
    called: str  # in messages about it

    @classmethod
    def load(cls, name: str, called: str | None = None) -> Target:
        """On CPU, in its own dtype, which vLLM will take, too; float16 as float32. Raises
        CheckpointError."""
        source = resolve(name)
        config = load_config(source)
        dtype = own_dtype(config)
        module = load_module(
            source, config, torch.float32 if dtype == torch.float16 else dtype, CPU
        )
        return cls(name, module, load_tokenizer(source), called or name)

    @property
    def dtype(self) -> str:
        """The name of the dtype it is loaded in."""
        return str(self.module.dtype).removeprefix("torch.")

    @property
    def context(self) -> int:
        """Tokens that it can read."""
        return int(
            getattr(self.module.config.get_text_config(), "max_position_embeddings", None)
            or UNKNOWN_CONTEXT
        )

    @property
    def sizes(self) -> TargetSizes:
        return TargetSizes.of(
            self.module.config, self.module.get_output_embeddings().weight.shape[0]
        )


Writer = Callable[[Path, Path, Target], None]  # (from, to, target)


def kind_of(folder: Path) -> str:
    """The kind of drafter in a folder. Raises CheckpointError for an unknown one."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder '{folder}' to export")
    kind = head_kind(resolve(str(folder)))
    if kind is None and has_tokenizer(folder):
        return DRAFT_MODEL
    if kind is None:
        names = sorted(HeadSource.open(folder).names)
        raise CheckpointError(
            f"'{folder}' holds no drafter that we know; it has the tensors {', '.join(names[:6])}"
        )
    return kind


def _draft_model(source: Path, out: Path, target: Target) -> None:
    export_draft(source, out, target.called, target.tokenizer)


def _medusa(layout: str) -> Writer:
    def write(source: Path, out: Path, target: Target) -> None:
        heads = load_medusa(source, target.sizes.hidden_size, target.sizes.vocab_size)
        heads.bind(target.module.get_output_embeddings())
        export_medusa(heads, out, layout)

    return write


def _block(layout: str) -> Writer:
    def write(source: Path, out: Path, target: Target) -> None:
        sizes = target.sizes
        head = load_block(source, sizes.hidden_size, sizes.vocab_size, sizes.num_layers)
        head.bind(target.module.get_input_embeddings(), target.module.get_output_embeddings())
        head.config = _addressed(head.config, layout, target)
        export_block(head, out, layout, tables=True)

    return write


def _eagle(kind: Kind, layout: str) -> Writer:
    def write(source: Path, out: Path, target: Target) -> None:
        head = load_eagle(source, kind, target.sizes)
        head.bind(
            target.module.get_input_embeddings().weight, target.module.get_output_embeddings()
        )
        head.config = _addressed(head.config, layout, target)
        export_eagle(head, out, layout, architectures=target.module.config.architectures or ())

    return write


def _addressed(config: Config, layout: str, target: Target) -> Config:
    """The target's path or hub id, which a head in speculators' layout names and `vllm serve
    FOLDER` loads."""
    return replace(config, trained_for=target.name) if layout == "speculators" else config


WRITERS: dict[str, dict[str, Writer]] = {
    DRAFT_MODEL: {"transformers": _draft_model},
    "medusa": {"medusa": _medusa("original"), "vllm": _medusa("vllm")},
    "eagle": {layout: _eagle("eagle", layout) for layout in ("raw", FP8)},
    "eagle3": {layout: _eagle("eagle3", layout) for layout in ("raw", "speculators", FP8)},
    "block": {"raw": _block("raw"), "speculators": _block("speculators")},
}


def writer_for(source: Path, layout: str) -> tuple[str, Writer]:
    """A drafter's kind, and what writes it in this layout. Raises ConfigError for a layout that the
    kind does not have, CapabilityError for a kind that nobody else reads, CheckpointError where
    there is no drafter."""
    kind = kind_of(source)
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout '{layout}'.{did_you_mean(layout, LAYOUTS)}")
    writers = WRITERS.get(kind, {})
    if not writers:
        use = how_to_draft(kind, str(source))
        raise CapabilityError(
            f"'{source}' is of kind '{kind}', which no other program reads; use it with {use}"
        )
    if layout not in writers:
        raise ConfigError(
            f"'{source}' is of kind '{kind}', whose layouts are {', '.join(writers)}; got "
            f"'{layout}'"
        )
    return kind, writers[layout]


def export(source: Path, layout: str, out: Path, target: Target) -> str:
    """Write it, whole or not at all; returns its kind.

    Raises what `writer_for` raises, CheckpointError when it does not fit the target, OutriderError
    when the disk is full.
    """
    kind, write = writer_for(source, layout)
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} is there already and not empty; give another --out")
    is_new = not out.exists()
    scratch = out / ".new"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        write(source, scratch, target)
        for file in scratch.iterdir():
            file.rename(out / file.name)
    except OutriderError:
        raise
    except Exception as error:  # of torch, safetensors and the system
        why = why_unwritten(out, error)
        outcome = "nothing of it was kept, and when that is mended the same command writes it"
        raise OutriderError(f"{out} cannot be written ({why}); {outcome}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if is_new and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
    return kind


def check(source: Path, kind: str, layout: str, out: Path, target: Target) -> list[str]:
    """Load what was written as anybody would, and compare it with the source, rounded where the
    layout rounds: what was found, a line each.

    Raises CheckpointError with the first tensor that differs.
    """
    if kind == DRAFT_MODEL:
        return check_draft(source, out, target.module)
    ours, theirs = (load_head(kind, folder, target) for folder in (source, out))
    count = _same_tensors(ours, theirs, out, in_8_bits=layout == FP8)
    config = load_object(out / "config.json")
    architecture = ", ".join(config.get("architectures") or []) or "no architecture named"
    sizes = target.sizes
    return [
        f"{count} tensors of {out} are those of {source}"
        f"{' in 8 bits' if layout == FP8 else ''}, and fit {target.called} "
        f"({sizes.num_layers} layers of {sizes.hidden_size}, {sizes.vocab_size} tokens)",
        f"config.json: {architecture}",
        *(f"vLLM: {line}" for line in obstacles(theirs) if layout != FP8),
    ]


def load_head(kind: str, folder: Path, target: Target) -> nn.Module:
    """A head of any kind but `draft-model`. Raises CheckpointError when it does not fit the target."""
    sizes = target.sizes
    if kind == "medusa":
        return load_medusa(folder, sizes.hidden_size, sizes.vocab_size)
    if kind == "block":
        return load_block(folder, sizes.hidden_size, sizes.vocab_size, sizes.num_layers)
    return load_eagle(folder, "eagle3" if kind == "eagle3" else "eagle", sizes)


def _same_tensors(ours: nn.Module, theirs: nn.Module, out: Path, *, in_8_bits: bool) -> int:
    """How many tensors are equal, matrices once they are rounded to 8 bits where they were written
    so: all of ours must be there; theirs may have the target's tables alongside them."""
    left = ours.state_dict()
    right = theirs.state_dict()
    for name, value in left.items():
        if name not in right:
            raise CheckpointError(f"{out} lacks tensor '{name}'")
        there = right[name]
        expected = rounded_to_fp8(value).to(there.dtype) if in_8_bits else value
        if not torch.equal(expected.float(), there.float()):
            raise CheckpointError(f"{out}: tensor '{name}' is not that of the source")
    return len(left)


def obstacles(head: nn.Module) -> list[str]:
    """The parts of a head that vLLM would not read, or read otherwise, one line each; empty: none
    known (vLLM 0.32)."""
    if isinstance(head, EagleHead):
        return _of_eagle(head.config)
    if isinstance(head, BlockHead):
        return _of_block(head.config)
    return []


def _of_eagle(config: EagleConfig) -> list[str]:
    faults = []
    if config.fc_bias:
        faults.append("its fc layer has a bias, which vLLM does not read")
    if config.qk_norm and config.kind == "eagle":
        faults.append("its layer norms queries and keys, which vLLM's EAGLE has no place for")
    if config.attention_bias != config.output_bias and config.kind == "eagle3":
        faults.append(
            "its attention has biases in front and none after, where vLLM's EAGLE-3 has both or "
            "neither"
        )
    if config.logit_scale != 1.0 and config.kind == "eagle":
        faults.append(f"its logits are scaled by {config.logit_scale}, which vLLM's EAGLE ignores")
    if config.own_output and config.kind == "eagle":
        faults.append("it has an output layer of its own, where vLLM's EAGLE uses the target's")
    if len(config.signals) != len(set(config.signals)):
        faults.append(f"it reads one hidden state twice: {list(config.signals)}")
    return faults


def _of_block(config: BlockConfig) -> list[str]:
    faults = []
    is_dspark = bool(config.markov_rank) or config.confidence
    if config.sample_from_anchor and not is_dspark:
        faults.append(
            "its anchor's slot guesses, too, where vLLM's DFlash has only the masks guess "
            "(sample_from_anchor=false)"
        )
    if config.markov_gated or config.markov_recurrent:
        kind = "gated" if config.markov_gated else "recurrent"
        faults.append(f"its Markov head is {kind}; vLLM knows only 'vanilla'")
    if not config.qk_norm:
        faults.append("its layers do not norm queries and keys, which vLLM always does")
    scaled = {
        "embeddings": config.embedding_scale != 1.0,
        "logits": config.logit_scale != 1.0,
        "capped logits": bool(config.softcap),
    }
    faults += [
        f"it has scaled {what}, which vLLM ignores" for what, there in scaled.items() if there
    ]
    return faults
