"""The table of drafters: one file each, one line here. Third parties: entry point group
`outrider.drafters`."""

from outrider.registry import Entry, Registry

LOOKUP = "outrider.drafters.lookup"
MODEL = "outrider.drafters.model"
HEADS = "outrider.drafters.heads"
DRAFTERS = Registry(
    "drafter",
    {
        "none": Entry(
            "outrider.drafters.none:NoDrafter", "plain decoding, one token per target pass"
        ),
        "draft-model": Entry(
            f"{MODEL}.draft_tree:TreeModelDrafter",
            "a smaller model with the same tokenizer (--draft)",
        ),
        "ngram": Entry(
            f"{LOOKUP}.ngram:NgramDrafter",
            "prompt lookup: copies what followed the same words before",
        ),
        "prediction": Entry(
            f"{LOOKUP}.prediction:PredictionDrafter",
            "reads out the answer that the caller sends along",
        ),
        "suffix": Entry(
            f"{LOOKUP}.suffix:SuffixDrafter", "continues as this text or an earlier answer went on"
        ),
        "quantised": Entry(
            f"{MODEL}.quantised:QuantisedDrafter", "the target's own weights in 4 or 8 bits"
        ),
        "early-exit": Entry(
            f"{MODEL}.early_exit:EarlyExitDrafter",
            "the target's own first layers, or all but a few",
        ),
        "eagle": Entry(
            f"{HEADS}.eagle:EagleDrafter",
            "an EAGLE head (--draft): one layer continues the target's last state",
        ),
        "eagle3": Entry(
            f"{HEADS}.eagle:Eagle3Drafter",
            "an EAGLE-3 head (--draft): one layer on three of the target's states",
        ),
        "mtp": Entry(
            f"{HEADS}.mtp:MtpDrafter",
            "a multi-token-prediction head, most often in the target's own checkpoint",
        ),
        "lookahead": Entry(
            f"{LOOKUP}.lookahead:LookaheadDrafter", "Jacobi guesses in the target's own passes"
        ),
        "ngram-cache": Entry(
            f"{LOOKUP}.ngram_cache:NgramCacheDrafter",
            "what followed the same words in any text yet",
        ),
        "recycling": Entry(
            f"{LOOKUP}.recycling:RecyclingDrafter",
            "the target's likeliest next tokens when last there",
        ),
        "retrieval": Entry(
            f"{LOOKUP}.retrieval:RetrievalDrafter",
            "copies from your own corpus of texts (corpus=PATH)",
        ),
        "medusa": Entry(
            f"{HEADS}.medusa:MedusaDrafter",
            "heads (--draft) that guess the next tokens from one hidden state",
        ),
        "block": Entry(
            f"{HEADS}.block:BlockDrafter",
            "a few layers (--draft) that guess a whole block in one pass",
        ),
        "composite": Entry(
            "outrider.drafters.composite:CompositeDrafter",
            "several drafters in one tree, or the best of them",
        ),
        "remote": Entry(
            "outrider.remote.draft.drafter:RemoteDrafter",
            "a draft service in another process (--draft-endpoint)",
            "services",
            "grpc",
        ),
        "universal": Entry(
            f"{MODEL}.universal:UniversalDrafter", "a smaller model with any tokenizer (--draft)"
        ),
    },
)

__all__ = ["DRAFTERS"]
