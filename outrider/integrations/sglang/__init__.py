"""Outrider's look-up drafters inside SGLang, as its speculative algorithm OUTRIDER.

    OUTRIDER_DRAFTER=suffix python -m sglang.launch_server --model-path MODEL
    --speculative-algorithm OUTRIDER

SGLang finds `plugin.register` by the entry point group `sglang.srt.plugins`, and calls it in every
process. The worker is its own n-gram worker, with our drafter where its n-gram table is:
verification, grammars and caches stay SGLang's. docs/sglang.md is for operators. Read in SGLang
0.5.19, contract-tested against it, never run on a GPU.
"""
