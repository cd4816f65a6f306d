"""Verifiers: which draft tokens stay. One file each; to add one, write the class and add a line here.

Siblings of the drafters: neither package imports the other. The default for chains is `block`.
"""

from outrider.registry import Entry, Registry

VERIFIERS = Registry(
    "verifier",
    {
        "block": Entry(
            "outrider.verifiers.block:BlockVerifier",
            "block verification (default): most accepted tokens, lossless",
        ),
        "token": Entry("outrider.verifiers.token:TokenVerifier", "token-level rejection sampling, lossless"),
        "gumbel": Entry(
            "outrider.verifiers.coupled:CoupledVerifier",
            "shared noise, lossless: same seed, same text, whichever drafter or none",
        ),
    },
)

__all__ = ["VERIFIERS"]
