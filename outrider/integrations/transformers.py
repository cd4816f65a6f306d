"""`custom_generate` for transformers: `model.generate` decodes with our loop, on the model's own
weights.

    from outrider.integrations.transformers import speculative
    model.generate(**inputs, max_new_tokens=200, custom_generate=speculative(draft=small_model))

transformers prepares a call as always (inputs, masks, generation_config, logits processors,
stopping criteria) and hands over the decoding. What it prepared is the specification: processors
become `SamplingParams`, criteria become the ends of rows, and what has no equal here is refused by
name before the first token. The module is only borrowed: no weight is copied or packed, its
attention implementation is put back, also after an error. While the call runs, other threads must
not use the module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    LogitNormalization,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.build import Options, head_in, named_drafter
from outrider.decode import Decoder
from outrider.drafters.companions import AUTO
from outrider.errors import CapabilityError, ConfigError, RequestError
from outrider.models import attention
from outrider.models.heads.kinds import how_to_draft
from outrider.models.heads.on_hub import fetched_head
from outrider.models.lm import LM, LMShape, PassLimits, module_run
from outrider.models.loaded import LoadedModel, Tables
from outrider.models.loading.load import build_lm, finish, load_config, load_module, resolve_dtype
from outrider.models.loading.read_card import card_of
from outrider.models.source import resolve
from outrider.parts import Parts, choose_parts
from outrider.rows import Row
from outrider.run import run_rows
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from outrider.stops import StopStrings

# Processors with an equal of ours: its option, and the attribute to read; in the order of our
# distribution.
PROCESSORS: Mapping[type, tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
# Fields of generation_config honoured at every value: here, through PROCESSORS, or by transformers
# itself.
HONOURED_FIELDS = (
    "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "renormalize_logits", "num_return_sequences", "return_dict_in_generate",
    "eos_token_id", "pad_token_id", "bos_token_id", "disable_compile", "transformers_version",
)  # fmt: skip
PREPARED_INPUTS = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
)


def speculative(
    *,
    draft: str | Path | PreTrainedModel | None = None,
    drafter: str = "auto",
    num_draft_tokens: int | str | None = None,
    drafter_options: dict[str, Any] | None = None,
    verifier: str = "auto",
    verifier_options: dict[str, Any] | None = None,
    lossy: bool = False,
) -> Speculative:
    """The object for `model.generate(custom_generate=...)`. Keep it: probes and a named draft are
    reused.

    `draft` is a loaded model (borrowed as the target is), a local folder or a hub id; also the
    folder of a trained head. Drafter "auto" is "draft-model" with a draft, what drafts with the
    head where it is one, else "suffix". Raises ConfigError on names and combinations that do not
    exist.
    """
    folder = fetched_head(str(draft)) if isinstance(draft, str | Path) else None
    if folder == AUTO:
        raise ConfigError(
            "draft='auto' looks for the drafter of a target by its name, and here the target is "
            "handed over later: name the draft ('outrider ls drafters-for MODEL' lists them)"
        )
    if drafter == "auto" and folder is None and draft is not None:
        drafter = "draft-model"
    head = head_in(folder)
    options = named_drafter(
        Options("", drafter, folder, drafter_options=drafter_options or {}), head
    )
    if folder is not None and options.draft is None:
        draft = None  # a head, which is among its drafter's options now
    drafter = options.drafter
    parts = choose_parts(
        drafter,
        options.drafter_options,
        verifier,
        verifier_options or {},
        num_draft_tokens,
        lossy=lossy,
    )
    if parts.requirements.draft and head is not None and folder is not None:
        raise ConfigError(
            f"'{folder}' is a trained head, not a draft model: {how_to_draft(head, folder)}"
        )
    if parts.requirements.draft and draft is None:
        raise ConfigError(f"drafter '{drafter}' needs draft=: a model, a folder or a hub id")
    if draft is not None and not parts.requirements.draft:
        raise ConfigError(f"drafter '{drafter}' uses no draft model, but draft= was given")
    return Speculative(draft, parts)


class Speculative:
    """The callable behind `speculative`. `stats`: counters of the last call, summed over its rows."""

    def __init__(self, draft: str | Path | PreTrainedModel | None, parts: Parts) -> None:
        self._parts = parts
        self._draft = draft
        self._loaded: nn.Module | None = None  # a draft given by name, ours to pack
        self._known: WeakKeyDictionary[nn.Module, _ProbedModule] = WeakKeyDictionary()
        self.stats: DecodeStats | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        generation_config: GenerationConfig | None = None,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Called by `generate`: input_ids (B, T) int64, left-padded -> (B, T'), or as an output
        object."""
        config = generation_config or GenerationConfig()
        withheld = _withheld(sys._getframe(1))
        streamer = streamer or withheld.get("streamer")
        _refuse([*_foreign_fields(config), *_foreign_inputs(model_kwargs, withheld)])
        _refuse(["synced_gpus"] if synced_gpus or withheld.get("synced_gpus") else [])
        _refuse(
            ["a streamer with more than one row"]
            if streamer is not None and len(input_ids) > 1
            else []
        )
        prompts = _prompts(
            input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        )
        params = _sampling_params(
            logits_processor, bool(config.do_sample), input_ids.shape[1], prompts
        )
        max_length, stop_tokens = _ends(stopping_criteria)
        rows = _rows(prompts, params, max_length - input_ids.shape[1], stop_tokens)
        with _borrowed(model, self._draft_module(model)) as (target, draft):
            self._decode(self._decoder(target, draft, rows), rows, streamer)
        self.stats = reduce(DecodeStats.merge, (row.stats for row in rows))
        sequences = _padded(input_ids, rows, _pad_token(config, stop_tokens))
        return (
            GenerateDecoderOnlyOutput(sequences=sequences)
            if config.return_dict_in_generate
            else sequences
        )

    def _draft_module(self, target: nn.Module) -> nn.Module | None:
        """The draft model, loaded on first use when it was given by name."""
        if self._draft is None or isinstance(self._draft, nn.Module):
            return self._draft
        device = _device(target, "the model")
        if self._loaded is None or _device(self._loaded, "the draft") != device:
            name = str(self._draft)
            source = resolve(name)
            config = load_config(source)
            self._loaded = load_module(
                source, config, resolve_dtype("auto", config, device, ours=False), device
            )
        return self._loaded

    def _decoder(self, target: nn.Module, draft: nn.Module | None, rows: Sequence[Row]) -> Decoder:
        loaded = self._model(target, "the model", pack=False)
        _check_room(loaded.lm.shape, rows)
        guess = (
            None if draft is None else self._model(draft, "the draft", pack=draft is self._loaded)
        )
        if guess is not None and guess.lm.device != loaded.lm.device:
            raise ConfigError(
                f"the draft is on {guess.lm.device}, the model on {loaded.lm.device}; move one"
            )
        parts = self._parts
        return Decoder(
            loaded.lm,
            parts.make_drafter(loaded, guess),
            parts.make_verifier(),
            parts.make_control(),
        )

    def _model(self, module: Any, role: str, *, pack: bool) -> LoadedModel:
        """The module on a cache of ours; probed on its first call, and again when it looks
        different."""
        _check_module(module, role)
        name = f"{role} ({type(module).__name__})"
        seen = (module.dtype, _device(module, role), len(module.get_input_embeddings().weight))
        known = self._known.get(module)
        if known is None or known.seen != seen:
            lm = build_lm(module, name, module.dtype, seen[1])
            finish(lm, module, pack=pack)
            self._known[module] = _ProbedModule(seen, lm.shape, lm.limits)
        else:
            module.set_attn_implementation(attention.NAME)
            lm = LM(module_run(module), known.shape, module.dtype, seen[1])
            lm.limits = known.limits
        return LoadedModel(
            name,
            lm,
            card_of(module.config),
            None,
            frozenset(),
            config=module.config,
            tables=Tables.of(module),
        )

    def _decode(self, decoder: Decoder, rows: Sequence[Row], streamer: Any) -> None:
        """Every row to its end; the streamer gets each token once, as transformers' own loop gives
        them."""
        shown = 0
        for _ in run_rows(decoder, rows):
            if streamer is not None:
                for token in rows[0].output[shown:]:
                    streamer.put(torch.tensor([token]))
                shown = len(rows[0].output)
        if streamer is not None:
            streamer.end()


@dataclass(frozen=True)
class _ProbedModule:
    """The probes' results, and the state of the module that they are about."""

    seen: tuple[torch.dtype, torch.device, int]
    shape: LMShape
    limits: PassLimits


@contextmanager
def _borrowed(
    target: nn.Module, draft: nn.Module | None
) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Both modules, to run on our attention; configs and buffers are put back as they were found."""
    attention.register()
    parts = [part for module in (target, draft) if module is not None for part in module.modules()]
    configs: dict[int, Any] = {}
    for part in parts:
        _collect_configs(getattr(part, "config", None), configs)
    attentions = [(config, config._attn_implementation_internal) for config in configs.values()]
    # rotary tables
    buffers = [(part._buffers, dict(part._buffers)) for part in parts if part._buffers]
    try:
        yield target, draft
    finally:
        for config, implementation in attentions:
            # the setter overwrites nested configs
            config._attn_implementation_internal = implementation
        for current, original in buffers:
            current.update(original)


def _collect_configs(config: Any, configs: dict[int, Any]) -> None:
    """`config` and the configs inside it, by identity."""
    if not hasattr(config, "_attn_implementation_internal") or id(config) in configs:
        return
    configs[id(config)] = config
    for name in config.sub_configs:
        _collect_configs(getattr(config, name, None), configs)


def _withheld(caller: FrameType) -> dict[str, Any]:
    """Arguments of the running `generate` that it does not pass on to a callable (read in 5.17,
    5.20, 5.23).

    It starts the streamer and then drops it, with `assistant_model` and `synced_gpus`: a streamer
    would never see its end. They are read where they still stand, in the caller's variables. A
    direct call has none.
    """
    if caller.f_code is not inspect.unwrap(GenerationMixin.generate).__code__:
        return {}
    names = ("streamer", "assistant_model", "synced_gpus", "kwargs")
    return {name: caller.f_locals[name] for name in names if name in caller.f_locals}


def _refuse(things: Sequence[str]) -> None:
    if things:
        raise CapabilityError(
            f"custom_generate=speculative(...) cannot honour {', '.join(things)}; leave out one "
            "or the other."
        )


def _foreign_fields(config: GenerationConfig) -> list[str]:
    """Fields of generation_config that would change the result or the run, and that nothing here
    honours."""
    defaults = config._get_default_generation_params()
    foreign = []
    for name in vars(GenerationConfig()):
        value = getattr(config, name, None)
        idle = value is None or value is False or value == defaults.get(name)
        if name == "use_cache":
            idle = value is not False
        if not idle and not name.startswith("_") and name not in HONOURED_FIELDS:
            foreign.append(f"{name}={value!r}")
    return foreign


def _foreign_inputs(model_kwargs: Mapping[str, Any], withheld: Mapping[str, Any]) -> list[str]:
    """Inputs of the model other than token ids and their mask."""
    foreign = [
        name
        for name, value in model_kwargs.items()
        if not (value is None or name in PREPARED_INPUTS)
    ]
    cache = model_kwargs.get("past_key_values")
    given = withheld.get("kwargs", {})
    if cache is not None and (
        given.get("past_key_values") is not None or cache.get_seq_length() > 0
    ):
        foreign.append("past_key_values")
    if given.get("logits_to_keep") is not None:
        foreign.append("logits_to_keep")
    if withheld.get("assistant_model") is not None:
        foreign.append("assistant_model (give it as speculative(draft=...))")
    return foreign


def _prompts(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[list[int]]:
    """The rows of input_ids (B, T) without their left padding, from where `positions` must count."""
    real = (
        torch.ones_like(input_ids, dtype=torch.bool)
        if mask is None
        else mask.to(input_ids.device) != 0
    )
    if real.shape != input_ids.shape or bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise CapabilityError(
            "attention_mask may only hide the beginning of a row. Set tokenizer.padding_side = "
            "'left'."
        )
    if not bool(real.any(dim=1).all()):
        raise RequestError(
            "a row of input_ids is empty or hidden as a whole: there is nothing to continue"
        )
    counted = real.long().cumsum(dim=1) - 1
    if positions is not None:
        fits = positions.dim() == 2 and positions.shape[1] == input_ids.shape[1]
        if not fits or not torch.equal(
            positions.to(counted).expand_as(counted)[real], counted[real]
        ):
            _refuse(["position_ids other than 0, 1, 2, ... from the first token"])
    return [row[keep].tolist() for row, keep in zip(input_ids, real, strict=True)]


def _sampling_params(
    processors: Sequence[Any], do_sample: bool, width: int, prompts: Sequence[Sequence[int]]
) -> SamplingParams:
    """The distribution the processors describe. Refuses one that has no equal, or stands in another
    order."""
    options: dict[str, Any] = {}
    order = list(PROCESSORS)
    last = -1
    for processor in processors:
        kind = type(processor)
        if kind is LogitNormalization:  # a distribution is normalised in any case
            continue
        if kind not in PROCESSORS:
            _refuse([f"the logits processor {kind.__name__}"])
        if order.index(kind) <= last:
            _refuse([f"the logits processor {kind.__name__} after {order[last].__name__}"])
        _check_plain(processor, [width - len(prompt) for prompt in prompts])
        last = order.index(kind)
        option, attribute = PROCESSORS[kind]
        options[option] = getattr(processor, attribute)
    options["temperature"] = options.get("temperature", 1.0) if do_sample else 0.0
    return SamplingParams(**options)


def _check_plain(processor: Any, padding: list[int]) -> None:
    """Constructor arguments that generate itself never sets, and our filters do not have."""
    for attribute, usual in (("filter_value", -torch.inf), ("min_tokens_to_keep", 1)):
        if getattr(processor, attribute, usual) != usual:
            _refuse([f"{type(processor).__name__} with {attribute}"])
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):
        # generate names the left padding here
        ignored = None if ignored.tolist() == padding else ignored
    if ignored not in (None, 0):
        _refuse([f"{type(processor).__name__} with prompt_ignore_length"])


def _ends(criteria: Sequence[Any]) -> tuple[int, frozenset[int]]:
    """(length of the padded batch at which every row ends, tokens that end a row)."""
    lengths: list[int] = []
    tokens: set[int] = set()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            tokens.update(criterion.eos_token_id.flatten().tolist())
        else:
            _refuse([f"the stopping criterion {type(criterion).__name__}"])
    if not lengths:
        raise ConfigError("no limit: give max_new_tokens or max_length")
    return min(lengths), frozenset(tokens)


def _rows(
    prompts: Sequence[list[int]], params: SamplingParams, num_new: int, stop_tokens: frozenset[int]
) -> list[Row]:
    """Rows seeded by torch's generator, so that `torch.manual_seed` and `set_seed` repeat a sampled
    call."""
    if num_new < 1:
        raise ConfigError(f"max_length leaves {num_new} tokens to generate; at least 1 is needed")
    seeds = (
        [0] * len(prompts)
        if params.is_greedy
        else torch.randint(2**63 - 1, (len(prompts),)).tolist()
    )
    return [
        Row(
            request=number,
            tokens=list(prompt),
            num_prompt=len(prompt),
            params=params,
            seed=seed,
            max_tokens=len(prompt) + num_new,
            stop_tokens=stop_tokens,
            detokenizer=None,
            stops=StopStrings([]),
        )
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]


def _check_room(shape: LMShape, rows: Sequence[Row]) -> None:
    longest = max(row.max_tokens for row in rows)
    if longest > shape.context_length:
        raise CapabilityError(
            f"a row may grow to {longest} tokens, the context holds {shape.context_length}: lower "
            "max_length"
        )
    outside = [token for row in rows for token in row.tokens if not 0 <= token < shape.vocab_size]
    if outside:
        raise RequestError(
            f"input_ids has token {outside[0]}, outside the vocabulary of {shape.vocab_size}"
        )


def _check_module(module: Any, role: str) -> None:
    """Kinds and modes of a module that cannot be borrowed."""
    if module.config.is_encoder_decoder:
        raise CapabilityError(f"{role} ({type(module).__name__}) is no decoder-only model")
    if module.training:
        raise CapabilityError(
            f"{role} ({type(module).__name__}) is in training mode; call .eval() first"
        )


def _device(module: nn.Module, role: str) -> torch.device:
    """The one device a module is on."""
    devices = {weight.device for weight in module.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise CapabilityError(
            f"{role} must be on one device, found {', '.join(sorted(map(str, devices)))}."
        )
    return devices.pop()


def _pad_token(config: GenerationConfig, stop_tokens: frozenset[int]) -> int:
    """The token after a finished row: transformers prepared it, an end token when the model names
    none."""
    prepared = getattr(config, "_pad_token_tensor", config.pad_token_id)
    return min(stop_tokens, default=0) if prepared is None else int(prepared)


def _padded(input_ids: Tensor, rows: Sequence[Row], pad: int) -> Tensor:
    """input_ids (B, T) and every row's output after it, right-padded to the longest."""
    width = max(len(row.output) for row in rows)
    outputs = [row.output + [pad] * (width - len(row.output)) for row in rows]
    return torch.cat([input_ids, torch.tensor(outputs).to(input_ids)], dim=1)
