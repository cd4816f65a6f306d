"""Verifiers: which draft tokens stay. One file each; to add one, write the class and add a line
here.

Siblings of the drafters: neither package imports the other. The default is `block` for chains and
`traversal` for trees. A lossy verifier declares it and needs an explicit switch (`lossy=True`,
`--lossy`).
"""

from outrider.registry import Entry, Registry

VERIFIERS = Registry(
    "verifier",
    {
        "block": Entry(
            "outrider.verifiers.block:BlockVerifier",
            "block verification (default for chains): most accepted tokens, lossless",
        ),
        "traversal": Entry(
            "outrider.verifiers.traversal:TraversalVerifier",
            "traversal verification (default for trees): whole paths first, lossless",
        ),
        "token": Entry(
            "outrider.verifiers.token:TokenVerifier", "token-level rejection sampling, lossless"
        ),
        "multi-round": Entry(
            "outrider.verifiers.multi_round:MultiRoundVerifier",
            "rejection sampling of trees, top down, lossless",
        ),
        "gumbel": Entry(
            "outrider.verifiers.coupled:CoupledVerifier",
            "shared noise, lossless: same seed, same text, whichever drafter or none",
        ),
        "typical": Entry(
            "outrider.verifiers.typical:TypicalVerifier",
            "LOSSY: keeps what is likely enough (Medusa)",
        ),
        "top-k": Entry(
            "outrider.verifiers.top_k:TopKVerifier", "LOSSY: keeps what is among the likeliest K"
        ),
    },
)

__all__ = ["VERIFIERS"]
