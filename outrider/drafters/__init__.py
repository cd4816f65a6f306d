"""The table of drafters: one file each, one line here. Third parties: entry point group `outrider.drafters`."""

from outrider.registry import Entry, Registry

DRAFTERS = Registry(
    "drafter",
    {
        "none": Entry("outrider.drafters.none:NoDrafter", "plain decoding, one token per target pass"),
        "draft-model": Entry("outrider.drafters.draft_tree:TreeModelDrafter", "a smaller model with the same tokenizer"),
        "ngram": Entry("outrider.drafters.ngram:NgramDrafter", "prompt lookup: copies what followed the same words before"),
        "prediction": Entry("outrider.drafters.prediction:PredictionDrafter", "reads out the answer that the caller expects"),
        "suffix": Entry("outrider.drafters.suffix:SuffixDrafter", "goes on as this text or an earlier answer went on"),
        "quantised": Entry("outrider.drafters.quantised:QuantisedDrafter", "the target's own weights in 4 or 8 bits"),
        "early-exit": Entry("outrider.drafters.early_exit:EarlyExitDrafter", "the target's own first layers, or all but a few"),
        "eagle": Entry("outrider.drafters.eagle:EagleDrafter", "an EAGLE head: one layer that continues the target's last state"),
        "eagle3": Entry("outrider.drafters.eagle:Eagle3Drafter", "an EAGLE-3 head: one layer on three of the target's states"),
        "mtp": Entry("outrider.drafters.mtp:MtpDrafter", "the multi-token-prediction head in the target's own checkpoint"),
        "lookahead": Entry("outrider.drafters.lookahead:LookaheadDrafter", "Jacobi guesses in the target's own passes"),
        "ngram-cache": Entry("outrider.drafters.ngram_cache:NgramCacheDrafter", "what followed the same words in any text yet"),
        "recycling": Entry("outrider.drafters.recycling:RecyclingDrafter", "the target's likeliest next tokens when last there"),
        "retrieval": Entry("outrider.drafters.retrieval:RetrievalDrafter", "copies from your own corpus of texts"),
        "medusa": Entry("outrider.drafters.medusa:MedusaDrafter", "heads that guess the next tokens from one hidden state"),
        "block": Entry("outrider.drafters.block:BlockDrafter", "a few layers that guess a whole block in one pass"),
        "composite": Entry("outrider.drafters.composite:CompositeDrafter", "several drafters in one tree, or the best of them"),
        "remote": Entry("outrider.remote.draft.drafter:RemoteDrafter", "a draft service, here or on another machine", "services"),
        "universal": Entry("outrider.drafters.universal:UniversalDrafter", "a smaller model with any tokenizer"),
    },
)

__all__ = ["DRAFTERS"]
