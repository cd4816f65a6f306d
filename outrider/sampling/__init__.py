"""From logits to a law, and from two laws to accepted tokens: pure functions on tensors, no model,
no decoding state.

`distribution` is the only place where logits become probabilities; `rejection`, `block` and
`coupling` are the acceptance rules; `rng` holds the keyed random streams; `theory` the closed
forms. Heavy names are imported from their modules.
"""

from outrider.sampling.params import SamplingParams

__all__ = ["SamplingParams"]
