"""Switches a loaded model on CUDA to replays of its passes (graphs.py), once they give the logits
that it gives without."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from outrider.errors import CapabilityError, first_line
from outrider.models.draft_loop import DraftLoop, DraftLoopProgram
from outrider.models.graphs import GraphedPass, Graphs, memory_of
from outrider.models.loaded import LoadedModel
from outrider.models.probes.probe import check_same_logits, probe_logits


def use_graphs(
    loaded: LoadedModel, module: nn.Module, loop_lengths: Sequence[int], loop_vocab: int | None
) -> None:
    """Switches a model on CUDA to replays of its passes and, optionally, of a drafting loop.

    With `loop_vocab`, the loop drafts over that vocabulary, and its calls make as many tokens as
    `loop_lengths` says. Raises CapabilityError, and changes nothing, when it cannot be recorded (it
    looks at its own numbers on the host, say) or its replays do not reproduce its logits.
    """
    lm = loaded.lm
    plain = loaded.lm.run
    expected = probe_logits(loaded.lm)
    loops: dict[int, GraphedLoop] = {}
    if loop_vocab is not None:
        loops = {
            length: GraphedLoop(DraftLoopProgram(lm, module, length, loop_vocab))
            for length in loop_lengths
        }
    lm.run = GraphedPass(plain)
    try:
        probe_logits(lm)  # two passes of one shape: the second is recorded
        check_same_logits(lm, expected, module)
    except (CapabilityError, RuntimeError) as error:
        lm.run = plain
        reason = first_line(_first(error)).rstrip(".")
        raise CapabilityError(f"its passes cannot be recorded as CUDA graphs: {reason}") from error
    if loops:
        loaded.draft_loop = DraftLoop(lm, loops)


def _first(error: BaseException) -> BaseException:
    """The error that broke a recording: torch raises a second, vaguer one when it ends a broken
    recording."""
    while error.__context__ is not None:
        error = error.__context__
    return error


class GraphedLoop:
    """A whole drafting loop as one recording, which `DraftLoop` calls."""

    def __init__(self, program: DraftLoopProgram) -> None:
        self._program = program
        self.graphs = Graphs()

    def __call__(
        self,
        state: Tensor,
        key_positions: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        draws: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """See `DraftLoopProgram.forward`."""

        def call(*inputs: Tensor) -> tuple[Tensor, ...]:
            return self._program(*inputs[:2], keys, values, list(inputs[2:]))

        return tuple(
            self.graphs.run(memory_of([*keys, *values]), call, (state, key_positions, *draws))
        )
