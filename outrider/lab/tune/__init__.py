"""Which drafter, how many tokens, at which load: measured once, predicted for everything, confirmed where it matters.

    space.py      what could be tried: families of configurations that differ in draft size alone
    probe.py      one short run of each family, sweeping over sizes: what steps cost, how far drafts survive
    forecast.py   from probes to tokens per second of every member of every family
    confirm.py    the best few against plain decoding, in a round of `bench` over prompts that no probe has seen
    tune.py       the stages in their order; settings_file.py: what `generate --settings` loads
"""
