"""The speculative loop: the one step there is, which `LLM`, benchmarks and servers all call.

    draft    = drafter.propose(rows, gamma)          guess
    output   = target.forward(pending + draft)       ONE target pass
    probs    = distribution(output, sampling)        the target's distribution at every node; greedy = one-hot (never written out)
    verdict  = verifier.verify(draft, probs)         longest kept path, then a correction or bonus token
    taken    = rows.append(draft, verdict)           end of text, stop strings and limits may shorten it
    target.kv.keep(path); drafter.commit(...)        forget the rest, learn

Invariants (each has a test): every row has one pending token, committed but in no cache; models
catch up by feeding `tokens[kv.text_length:]`; after a commit every cache equals a fresh start.
Plain decoding has an empty draft. Sources: Leviathan et al. 2211.17192; Chen et al. 2302.01318.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.drafters.forced import with_forced
from outrider.drafters.proposals import proposed
from outrider.errors import NumericalError
from outrider.models.lm import LM
from outrider.rows import Row, Rows
from outrider.runtime.torch_threads import spare_threads
from outrider.step import Clock, Control, PromptReader, StepFacts, StepObserver
from outrider.types import Draft, TargetOutput, Verdict
from outrider.verifiers.base import Verifier
from outrider.verifiers.batch import batch_verdict
from outrider.verifiers.fast import verdicts_of


class Decoder:
    """Target, drafter, verifier and their rows. `max_forced`: nodes that a grammar may add a row."""

    def __init__(
        self,
        target: LM,
        drafter: Drafter,
        verifier: Verifier,
        control: Control,
        max_forced: int = 0,
    ) -> None:
        self.max_forced = max_forced
        self.prefill: PromptReader | None = None  # of long prompts; None: they are read whole
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        self.control = control
        self.observers: list[StepObserver] = []
        self._kernels = verdicts_of(target)
        self.rows = Rows(
            target.shape.vocab_size, target.device, coupled=verifier.coupled, noise=self._kernels
        )

    def add(self, row: Row) -> None:
        """A row joins; its prompt is fed by the next step's catch-up."""
        index = self.target.kv.add_row()  # first: a draft on the target's keys joins after it
        try:
            self.drafter.join(self.rows, row)
        except BaseException:
            self.target.kv.swap_remove(index)
            raise

    def remove(self, index: int) -> Row:
        """A row leaves, finished or not; the last row takes its index."""
        self.target.kv.swap_remove(index)
        self.drafter.stop(index)
        return self.rows.swap_remove(index)

    @spare_threads
    @torch.inference_mode()
    def step(self) -> list[int]:
        """One target pass for every row; returns how many tokens each row took."""
        rows = self.rows
        clock = Clock(self.target.device)
        with clock("target", priced=False):
            self.catch_up()
        with clock("draft", priced=False):
            asked = self.control.choose(rows)
            self.drafter.catch_up(rows, asked)
        with clock("draft"):
            own = proposed(self.drafter, rows, asked)
            grown = with_forced(own, self.drafter, rows, self.max_forced)
            draft = grown.draft
        with clock("target"):
            output = self.target.forward(
                self._pass_tokens(draft), draft.parents, capture=self.drafter.signals
            )
        with clock("verify"):
            verdict = self._verify(output.logits, draft)  # (B, N+1, V)
            taken = rows.append(draft, verdict, output.logits)
        with clock("other"):
            kept_columns = self._keep(verdict, taken)
        with clock("draft"):
            own_verdict = grown.own_verdict(verdict)
            seen = grown.own_output(TargetOutput(output.logits, output.hidden, kept_columns))
            self.drafter.commit(rows, own, own_verdict, seen)
        clock.share(rows, output.experts)
        facts = StepFacts(rows, asked, draft, verdict, *clock.of_step, experts=output.experts)
        for observer in self.observers:
            observer.observe(facts)
        self.control.observe(facts.of_drafter(own, own_verdict))
        return taken

    def catch_up(self) -> None:
        """The target has read every row up to its pending token, and the drafter what it wants."""
        if self.prefill is not None:
            self.prefill.read(self.target, self.rows)
        signals = self.drafter.signals
        self.target.catch_up(
            [row.tokens for row in self.rows], signals, self.drafter.read if signals else None
        )

    def _pass_tokens(self, draft: Draft) -> Tensor:
        """(B, N+1) int64: pending token, then the draft's nodes."""
        pending = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self.target.device)
        return torch.cat([pending, draft.tokens], dim=1) if draft.num_nodes else pending

    def _verify(self, logits: Tensor, draft: Draft) -> Verdict:
        try:
            return batch_verdict(logits, draft, self.rows, self.verifier, self._kernels)
        except NumericalError as error:
            steps = max(row.stats.steps for row in self.rows)
            raise NumericalError(
                f"generation stopped after {steps} steps: {error}{self._blame()}"
            ) from error

    def _blame(self) -> str:
        """The layer in which a pass went wrong, as far as the cache shows it: keys are made from
        what enters a layer."""
        layer = self.target.kv.first_broken_layer()
        last = self.target.shape.num_layers - 1
        if layer is None:
            return f" (the keys and values of all layers are finite: look at layer {last} and the output head)"
        before = "the embedding" if layer == 0 else f"layer {layer - 1}"
        return f" (first broken numbers: keys or values of layer {layer} of 0..{last}, fed by {before})"

    def _keep(self, verdict: Verdict, taken: list[int]) -> list[list[int]]:
        """Commit the pending token and the kept nodes but the last token of each row, its new
        pending one; the columns kept."""
        kept_columns = [
            [0, *(node + 1 for node in path[: n - 1])]
            for path, n in zip(verdict.lists.path, taken, strict=True)
        ]
        for index, columns in enumerate(kept_columns):
            self.target.kv.keep(index, columns)
        return kept_columns
