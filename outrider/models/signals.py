"""Hidden states out of a model's pass, for drafters that guess from what the target thinks rather
than from its tokens.

    k in 0..L-1   the residual stream entering decoder layer k (transformers' hidden_states[k])
    L             leaving the last layer, before the final norm
    -1            what the output head reads, after the final norm

They are seen by hooks that live for one pass: nothing is copied, and a pass that nobody listens to
costs nothing more. Other numberings (layer OUTPUTS, vLLM's and transformers' last entries) are the
readers' to translate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from outrider.errors import CapabilityError, ConfigError
from outrider.lazy import transformers

AFTER_NORM = -1  # the key of what the output head reads
NO_SIGNALS = "So its hidden states cannot be read; use a drafter that needs none."


def decoder_layers(module: Any, name: str = "the target", hint: str = NO_SIGNALS) -> nn.ModuleList:
    """The one list of modules that is as long as the config says the model has layers (inner lists
    do not count).

    Raises CapabilityError, `hint` at its end, where there is none, or more than one.
    """
    # several decoders: none (BLT)
    count = getattr(module.config.get_text_config(), "num_hidden_layers", None)
    lists: dict[str, nn.ModuleList] = {}
    for path, part in module.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in lists)
        if isinstance(part, nn.ModuleList) and len(part) == count and not inside:
            lists[path] = part
    if len(lists) != 1:
        what = f"{len(lists)} lists ({', '.join(lists)})" if lists else "no list"
        which = "decoder layers" if count is None else f"{count} decoder layers"
        raise CapabilityError(
            f"{name} ({module.config.model_type}): its {which} were not found: {what} of that "
            f"many modules. {hint}"
        )
    return next(iter(lists.values()))


def check_capture(layers: Sequence[int], num_layers: int, what: str) -> None:
    """Raise ConfigError when one of these keys names no hidden state of a model of `num_layers`
    layers."""
    wrong = [layer for layer in layers if not AFTER_NORM <= layer <= num_layers]
    if wrong:
        raise ConfigError(
            f"{what} wants the hidden states of layer {wrong[0]}, but the target has layers "
            f"0..{num_layers - 1} "
            f"({num_layers}: after the last, -1: after the final norm). It was made for another "
            "target."
        )


class Listening:
    """Hooks for one set of keys on one module. Raises CapabilityError where a layer cannot be found
    or speaks otherwise."""

    def __init__(self, module: Any, layers: Sequence[int]) -> None:
        self._name = module.config.model_type
        self._keys = tuple(layers)
        self._layers: list[Any] = []
        if set(layers) != {AFTER_NORM}:
            self._layers = list(decoder_layers(module))
            check_capture(layers, len(self._layers), f"{self._name}: someone")
        self._base = _base_of(module)  # its output is what the head reads
        if AFTER_NORM in self._keys and self._base is module:
            raise CapabilityError(
                f"{self._name}: no module below its output head was found, whose states could be "
                "captured"
            )

    @contextmanager
    def during(self, states: dict[int, Tensor]) -> Iterator[None]:
        """Fill `states` with (B, T, H) per key in the pass made inside."""
        hooks = [self._hook(key, states) for key in self._keys]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if silent := [key for key in self._keys if key not in states]:
            raise CapabilityError(
                f"{self._name}: its hidden states {silent} cannot be captured; use a drafter that "
                "needs none"
            )

    def _hook(self, key: int, states: dict[int, Tensor]) -> Any:
        def entering(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[key] = _states(args[0] if args else kwargs.get("hidden_states"), part)

        def leaving(part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            states[key] = _states(output if isinstance(output, Tensor) else output[0], part)

        if 0 <= key < len(self._layers):
            return self._layers[key].register_forward_pre_hook(entering, with_kwargs=True)
        return (self._base if key == AFTER_NORM else self._layers[-1]).register_forward_hook(
            leaving
        )


def _base_of(module: Any) -> Any:
    """The model below the output head; the module itself where none can be found."""
    base = module.get_decoder()
    if base is module or base is module.get_output_embeddings():
        # transformers looks for it by a name that some classes, Llama 4's for one, do not use, and
        # ModernBERT's for another part
        inner = [
            part for part in module.children() if isinstance(part, transformers.PreTrainedModel)
        ]
        return inner[0] if len(inner) == 1 else module
    return base


def _states(output: Any, part: nn.Module) -> Tensor:
    """Hidden states (B, T, H); not those of several streams (hyper-connections), which have a
    dimension more."""
    if not isinstance(output, Tensor) or output.dim() != 3:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise CapabilityError(
            f"{type(part).__name__}: its hidden states are no (rows, tokens, width) tensor but "
            f"{shape}"
        )
    return output
