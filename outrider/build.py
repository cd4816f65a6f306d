"""From options to a decoder that has passed every check: names resolved, memory weighed, models loaded, probed, compiled.

Everything that can be refused is refused here, before the first token, in the order that costs the user least time:
names and combinations first, then configs and tokenizers, then memory, then weights.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from outrider.decode import Decoder
from outrider.demo import demo_head, demo_heads, demo_paths
from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter
from outrider.errors import CapabilityError, CheckpointError, ConfigError
from outrider.models.compiled import CompiledModel
from outrider.models.graphs import use_graphs
from outrider.models.heads.kinds import head_kind, how_to_draft
from outrider.models.load import (
    LoadedModel,
    Tables,
    build_lm,
    eos_token_ids,
    finish,
    load_config,
    load_module,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from outrider.models.memory import MemoryReport, estimate_memory
from outrider.models.workshop import Workshop
from outrider.parts import Parts, choose_parts
from outrider.settings import parse_settings

COMPILE_MODES = ("auto", "on", "off")
DEMO = "demo"  # the name of the embedded pair, as target and as draft


@dataclass(frozen=True)
class Options:
    """Everything that shapes a decoder; what `LLM(...)` and the command line fill in."""

    target: str
    drafter: str = "auto"
    draft: str | None = None
    num_draft_tokens: int | str | None = None  # nodes per row and step; "auto" or "auto:12"; None: the drafter's default
    drafter_options: dict[str, Any] = field(default_factory=dict)
    verifier: str = "auto"
    verifier_options: dict[str, Any] = field(default_factory=dict)
    lossy: bool = False
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    compile: str = "auto"
    max_num_seqs: int = 8
    max_model_len: int | None = None
    trust_remote_code: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.compile not in COMPILE_MODES:
            raise ConfigError(f"compile must be one of auto, on, off; got '{self.compile}'.")
        if not 1 <= self.max_num_seqs <= 4096:
            raise ConfigError(f"max_num_seqs must be between 1 and 4096, got {self.max_num_seqs}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads must be at least 1, got {self.threads}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, got {self.max_model_len}")


@dataclass(frozen=True)
class Needs:
    """What one decoder, or several that share models, ask of them."""

    draft: bool = False  # a draft model
    module: bool = False  # the target's own weights, beside its packed ones
    loop_lengths: tuple[int, ...] = ()  # tokens that the calls of a compiled drafting loop make; none: there is no loop
    heads: tuple[tuple[type[Drafter], str], ...] = ()  # trained heads that draft, and their folders

    @classmethod
    def of(cls, parts: Parts) -> Needs:
        heads = parts.drafter.heads_of(parts.drafter_settings)
        return cls(parts.wants_draft, parts.wants_module, parts.loop_lengths, heads)

    @property
    def tables(self) -> bool:
        """Whether a head reads the target's embedding or output layer."""
        return any(kind.needs_head for kind, _ in self.heads)

    def signals(self, target_config: Any) -> tuple[int, ...]:
        """Hidden states of the target that the heads read."""
        return tuple(sorted({layer for kind, head in self.heads for layer in kind.head_signals(head, target_config)}))

    @classmethod
    def of_all(cls, several: Sequence[Parts]) -> Needs:
        """Of several that share models: with programs that make up any length they share the loop, too."""
        each = [cls.of(replace(parts, any_length=True)) for parts in several]
        heads = tuple(dict.fromkeys(head for n in each for head in n.heads))
        return cls(any(n.draft for n in each), any(n.module for n in each), max(n.loop_lengths for n in each), heads)


@dataclass
class Models:
    """Loaded and checked: any number of decoders may take turns on them, as long as their rows have left."""

    target: LoadedModel
    draft: LoadedModel | None
    options: Options  # of models and machine, resolved
    memory: MemoryReport
    context: int  # tokens a row may hold, prompt and answer
    notes: list[str]
    workshop: Workshop | None = None  # of programs for heads; None where the target runs uncompiled


@dataclass
class Built:
    """A decoder and what there is to say about it."""

    decoder: Decoder
    target: LoadedModel
    draft: LoadedModel | None
    options: Options  # resolved: no "auto" left
    memory: MemoryReport
    context: int  # tokens a row may hold, prompt and answer
    draws_trees: bool
    notes: list[str] = field(default_factory=list)  # one line each, for a person to read
    workshop: Workshop | None = None  # as in `Models`
    takes_prediction: bool = False  # the drafter looks at what rows predict

    def config(self) -> dict[str, Any]:
        """The resolved options as plain JSON."""
        return {
            **asdict(self.options),
            "exact": self.target.lm.limits.exact_rows and (self.target.lm.limits.exact_trees or not self.draws_trees),
            "lossless": self.decoder.verifier.lossless,
        }


def build(options: Options, status: Callable[[str], None] = lambda line: None) -> Built:
    """Load and check everything. `status` is told what takes long while it happens."""
    options, parts = choose(options)
    return assemble(load_models(options, Needs.of(parts), status), parts)


def choose(options: Options) -> tuple[Options, Parts]:
    """The parts that options ask for, before any model is read; the options with the head's folder where its drafter wants it."""
    head = head_in(options.draft)
    options = named_drafter(options, head)
    drafter = options.drafter
    parts = choose_parts(
        drafter, options.drafter_options, options.verifier, options.verifier_options, options.num_draft_tokens,
        lossy=options.lossy,
    )  # fmt: skip
    parts = replace(parts, length=parts.length.up_to(options.max_num_seqs))
    headed = drafter if parts.drafter.needs_head else parts.drafter.head_part(parts.drafter_settings)
    if headed is not None and parts.head is None:
        raise ConfigError(f"drafter '{headed}' needs a head trained for this target: --draft FOLDER ('outrider train' makes it)")
    if options.draft is not None and not parts.wants_draft:
        raise ConfigError(f"drafter '{drafter}' uses no draft model, but draft='{options.draft}' was given")
    if parts.wants_draft and options.draft is not None and head is not None:
        raise ConfigError(f"'{options.draft}' is a trained head, not a draft model: {how_to_draft(head, options.draft)}")
    if parts.wants_draft and options.draft is None and options.target != DEMO:
        raise ConfigError(f"drafter '{drafter}' needs a draft model: --draft FOLDER_OR_HUB_ID, or --drafter ngram")
    return options, parts


def named_drafter(options: Options, head: str | None) -> Options:
    """Drafter 'auto' by its name, and the folder of a head that is given as the draft where its drafter looks for it. `head`: see
    `head_in`."""
    drafter = options.drafter if options.drafter != "auto" else _best_drafter(options, head)
    return _with_head(_replace(options, drafter=drafter), drafter)


def target_config(options: Options) -> Any:
    """The target's config, read before anything else of it."""
    options = _resolve_names(options, Needs())
    return load_config(options.target, options.trust_remote_code, options.revision)


def embedded_heads(target: str) -> dict[str, str]:
    """Folders of the trained heads that come with a target, by the drafter that drafts with them."""
    return {name: str(folder) for name, folder in demo_heads().items()} if target == DEMO else {}


def load_models(options: Options, needs: Needs, status: Callable[[str], None] = lambda line: None) -> Models:
    """Target and, where needed, draft: weighed, loaded, probed, compiled. `options` of drafting play no part here."""
    asked = options
    options = _resolve_names(options, needs)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    labels = {options.target: asked.target, options.draft: asked.draft or "demo draft"}
    loader = _Loader(options, needs, device, status, labels)
    memory = loader.weigh()
    status(memory.one_line())
    target = loader.load(options.target)
    workshop = loader.workshop()
    loop_vocab = target.lm.shape.vocab_size if needs.loop_lengths else None
    draft = None if options.draft is None else loader.load(options.draft, loop_vocab)
    context = min(options.max_model_len or target.lm.shape.context_length, target.lm.shape.context_length)
    return Models(target, draft, loader.resolved(target, context), memory, context, loader.notes, workshop)


def assemble(models: Models, parts: Parts) -> Built:
    """A decoder of these parts on loaded models. Raises what the drafter's own checks raise."""
    target, draft = models.target, models.draft
    drafter = parts.make_drafter(target, draft if parts.wants_draft else None, models.workshop)
    decoder = Decoder(target.lm, drafter, parts.make_verifier(), parts.make_control())
    notes = [*models.notes, *drafter.notes]
    if not decoder.verifier.lossless:
        notes.append(f"verifier '{decoder.verifier.name}' is lossy: the text is not what the model alone would say")
    if not target.lm.limits.exact_rows:
        on_cpu = target.lm.device.type == "cpu"
        why = "its experts multiply the tokens of a pass together" if on_cpu else "kernels there differ with the size of a pass"
        notes.append(f"exact up to rounding here, not to the bit: {why}")
    if parts.draws_trees and not target.lm.limits.exact_trees:
        notes.append("trees are exact up to rounding here, not to the bit (--compile on with bfloat16 makes them so)")
    options = _replace(
        models.options,
        drafter=parts.drafter_name,
        num_draft_tokens=parts.length.asked,
        drafter_options=asdict(parts.drafter_settings),
        verifier=parts.verifier.name,
        verifier_options=asdict(parts.verifier_settings),
    )
    return Built(
        decoder, target, draft, options, models.memory, models.context, parts.draws_trees, notes, models.workshop,
        parts.takes_prediction,
    )  # fmt: skip


def _with_head(options: Options, drafter: str) -> Options:
    """--draft names the folder of the head for a drafter that needs one; from here on it is that drafter's option `head`."""
    kind: type[Drafter] = DRAFTERS.load(drafter)
    settings = parse_settings(kind.Settings, options.drafter_options, f"drafter '{drafter}'")
    part = drafter if kind.needs_head else kind.head_part(settings)
    if part is None:
        return options
    named = kind.head_of(settings)
    if options.draft is None:
        embedded = demo_head(part) if options.target == DEMO and named is None else None
        if embedded is None:
            return options
        return _replace(options, drafter_options=kind.with_head(options.drafter_options, part, str(embedded)))
    if named not in (None, options.draft):
        raise ConfigError(f"two heads were named: --draft {options.draft} and head={named}; give one")
    return _replace(options, draft=None, drafter_options=kind.with_head(options.drafter_options, part, options.draft))


def _best_drafter(options: Options, head: str | None) -> str:
    """What drafter 'auto' means: whoever drafts with the head that --draft names, a draft model where there is one, else n-gram
    lookup."""
    if head is not None and head in DRAFTERS.names() and DRAFTERS.load(head).needs_head:
        return head
    return "draft-model" if options.draft is not None or options.target == DEMO else "ngram"


def head_in(draft: str | None) -> str | None:
    """Which kind of trained head lies in the folder that --draft names. None: no head, no folder, or a damaged one, of which
    whoever loads it says more."""
    if draft is None or draft == DEMO or not Path(draft).is_dir():
        return None
    try:
        return head_kind(Path(draft))
    except CheckpointError:
        return None


def _resolve_names(options: Options, needs: Needs) -> Options:
    """'demo' becomes the embedded pair; its draft joins whenever a drafter wants one."""
    changes: dict[str, Any] = {}
    if options.target == DEMO:
        changes["target"] = str(demo_paths().target)
    if options.draft == DEMO or (options.target == DEMO and options.draft is None and needs.draft):
        changes["draft"] = str(demo_paths().draft)
    return _replace(options, **changes)


def _replace(options: Options, **changes: Any) -> Options:
    return Options(**{**asdict(options), **changes})


class _Loader:
    """Loads models one way, remembering what to tell the user."""

    def __init__(
        self, options: Options, needs: Needs, device: torch.device, status: Callable[[str], None],
        labels: dict[str | None, str],
    ) -> None:  # fmt: skip
        self.options, self.needs, self.device, self.status = options, needs, device, status
        self._labels = labels  # what the user called each model
        self.notes: list[str] = []
        self._compiled = device.type == "cpu"
        self._recorded = False  # CUDA graphs

    def _names(self) -> list[str]:
        return [name for name in (self.options.target, self.options.draft) if name is not None]

    def _config(self, name: str) -> Any:
        return load_config(name, self.options.trust_remote_code, self.options.revision if self._is_target(name) else None)

    def _is_target(self, name: str) -> bool:
        return name == self.options.target

    def weigh(self) -> MemoryReport:
        """Memory needed against available, before any weight of a model is read. Raises CapabilityError when it cannot fit,
        CheckpointError when a head was not made for this target."""
        configs = [self._config(name) for name in self._names()]
        dtype = resolve_dtype(self.options.dtype, configs[0], self.device)
        heads = [kind.weigh_head(head, configs[0], dtype) for kind, head in self.needs.heads]
        return estimate_memory(
            self._names(), configs, heads=heads, dtype=dtype, device=self.device,
            num_rows=1, num_tokens=self.options.max_model_len, packed=self.device.type == "cpu",
        )  # fmt: skip

    def workshop(self) -> Workshop | None:
        """Of the programs of heads, once the target is loaded: where it runs compiled, they may, too."""
        mode: Literal["on", "auto"] = "on" if self.options.compile == "on" else "auto"
        return Workshop(mode, self.status, self.notes) if self._compiled else None

    def load(self, name: str, loop_vocab: int | None = None) -> LoadedModel:
        """Config, tokenizer, weights, probes, fast path. `loop_vocab`: also a drafting loop over that vocabulary."""
        options = self.options
        revision = options.revision if self._is_target(name) else None
        config = self._config(name)
        tokenizer = load_tokenizer(name, options.trust_remote_code, revision)
        dtype = resolve_dtype(options.dtype, config, self.device)
        self.status(f"loading {self._labels[name]} ({str(dtype).removeprefix('torch.')}, {self.device})")
        module = load_module(name, config, dtype, self.device, options.trust_remote_code, revision)
        lm = build_lm(module, name, dtype, self.device)
        loaded = LoadedModel(name, lm, config, tokenizer, eos_token_ids(module, tokenizer, lm.shape.vocab_size))
        compiled = not self._record(loaded, module, loop_vocab) and self._compile(loaded, module, loop_vocab)
        finish(lm, module, pack=not compiled)
        if self._is_target(name) and self.needs.module:
            loaded.module = module
        if self._is_target(name) and (self.needs.tables or not compiled):  # uncompiled they are there anyway
            loaded.tables = Tables.of(module)
        del module
        gc.collect()  # a compiled program holds its own packed weights
        return loaded

    def _compile(self, loaded: LoadedModel, module: nn.Module, loop_vocab: int | None) -> bool:
        """Switch the model to its compiled programs when asked for (on) or already there (auto)."""
        self._compiled = self._compiled and self.options.compile != "off"
        if not self._compiled:
            return False
        signals = self._signals(loaded) if self._is_target(loaded.name) else ()
        model = CompiledModel(loaded, module, signals, self.needs.loop_lengths, loop_vocab, not self.options.trust_remote_code)
        if model.missing():
            if self.options.compile == "auto":
                self._compiled = False
                self.notes.append("running uncompiled; --compile on is faster (compiles once per model, a minute or two)")
                return False
            self.status(f"compiling {self._labels[loaded.name]}: once per model and machine, a minute or so")
        model.use()
        return True

    def _record(self, loaded: LoadedModel, module: nn.Module, loop_vocab: int | None) -> bool:
        """On CUDA, replay passes and the drafting loop as CUDA graphs, unless told not to or the model cannot be recorded."""
        if self.device.type != "cuda" or self.options.compile == "off":
            return False
        try:
            use_graphs(loaded, module, self.needs.loop_lengths, loop_vocab)
        except CapabilityError as error:
            if self.options.compile == "on":
                raise
            self.notes.append(f"running without CUDA graphs: {error}")
            return False
        self._recorded = True
        return True

    def _signals(self, target: LoadedModel) -> tuple[int, ...]:
        """Hidden states the target's program must give. That of the demo gives what any of its heads reads, so that one serves
        all of them: each further one costs a copy of a few rows, another program a minute."""
        needs = self.needs
        if needs.heads and self._labels[target.name] == DEMO:
            embedded = tuple((DRAFTERS.load(name), str(folder)) for name, folder in demo_heads().items())
            needs = replace(needs, heads=(*needs.heads, *embedded))
        return needs.signals(target.config)

    def resolved(self, target: LoadedModel, context: int) -> Options:
        """The options with every "auto" of models and machine replaced by what was chosen."""
        return _replace(
            self.options,
            dtype=str(target.lm.dtype).removeprefix("torch."),
            device=str(self.device),
            threads=torch.get_num_threads(),
            compile="on" if self._compiled or self._recorded else "off",
            max_model_len=context,
        )


