"""Which drafter, how many tokens, at which load: measured once, predicted for everything, confirmed
where it matters.

    families.py       what could be tried: families of configurations that differ in draft size alone (space.py)
    drafts.py         what `--draft` names: a draft model, trained heads
    probe.py          one short run of each family, sweeping over sizes: what steps cost, how far drafts survive
    forecast.py       from probes to tokens per second of every member of every family
    confirm.py        the best few against plain decoding, in a round of `bench` over prompts that no probe has seen
    decide.py         from findings to advice
    launch_lines.py   the same for other engines
    tune.py           the stages in their order; run.py: `run_tune`, all of it
"""

from outrider.extras import check_lab

check_lab("tune")
