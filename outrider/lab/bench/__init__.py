"""Plain against speculative decoding on the same prompts, in turn, until the answer is certain or the time is spent.

    plan.py         what is measured: configurations, cells (task, temperature, batch size, context), when to stop
    material.py     from a workload to the token ids of every cell, and to the groups that are decoded together
    stages.py       the cells, in which the rounds go on: journal, budget, who is still uncertain
    turn.py         one group of prompts through every configuration, in an order that rotates; busy neighbours: once more
    notes.py        from a trace to the numbers that are kept of it
    speedup.py      paired speedups with intervals, and whether more rounds would help
    acceptance.py   how far drafts survive
    machine.py      memory overhead, the roof of memory bandwidth
    summary.py      from runs to a cell's numbers        result.py   the file that reports are made from
    run.py          `run_bench`: all of it; servers.py: the same for servers
"""
