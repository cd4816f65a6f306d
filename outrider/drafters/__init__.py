"""The table of drafters: one file each, one line here. Third parties: entry point group `outrider.drafters`."""

from outrider.registry import Entry, Registry

DRAFTERS = Registry(
    "drafter",
    {
        "none": Entry("outrider.drafters.none:NoDrafter", "plain decoding, one token per target pass"),
        "draft-model": Entry("outrider.drafters.draft_model:ModelDrafter", "a smaller model with the same tokenizer"),
        "ngram": Entry("outrider.drafters.ngram:NgramDrafter", "prompt lookup: copies what followed the same words before"),
    },
)

__all__ = ["DRAFTERS"]
