"""The kinds that `outrider train` can train. One line each; nothing else knows a kind by its name.

A kind's class satisfies `recipe.RecipeKind` and its instances `recipe.Recipe`.
"""

from __future__ import annotations

from outrider.registry import Entry, Registry

KINDS = Registry(
    "recipe",
    {
        "draft-model": Entry(
            "outrider.train.draft_model:DraftModelRecipe",
            "a small causal language model, distilled",
        ),
        "medusa": Entry(
            "outrider.train.medusa:MedusaRecipe",
            "heads that guess the next tokens from one hidden state",
        ),
        "eagle": Entry(
            "outrider.train.eagle:EagleRecipe",
            "one layer that continues the target's last hidden state",
        ),
        "eagle3": Entry(
            "outrider.train.eagle:Eagle3Recipe",
            "one layer on three target hidden states, trained unrolled",
        ),
        "mtp": Entry(
            "outrider.train.mtp:MtpRecipe",
            "one more layer of the target's kind, or the MTP head it has",
        ),
        "block": Entry(
            "outrider.train.block:BlockRecipe", "a few layers that guess a whole block in one pass"
        ),
        "early-exit": Entry(
            "outrider.train.early_exit:EarlyExitRecipe",
            "norm and head correction for an exit layer",
        ),
        "acceptance": Entry(
            "outrider.train.acceptance:AcceptanceRecipe",
            "a head that predicts acceptance and stops drafting",
        ),
    },
    "kind of drafter",
)
