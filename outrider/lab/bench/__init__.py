"""Plain against speculative decoding on the same prompts, in turn, until the answer is certain or
the time is spent.

    plan.py         what is measured, and when to stop; from a workload to the token ids of every cell, in groups
    stages.py       the rounds through all cells: journal, budget, who is still uncertain, busy neighbours: once more
    notes.py        from a trace to the numbers that are kept of it
    machine.py      memory overhead, the roof of memory bandwidth
    summary.py      from runs to a cell's numbers: paired speedups, how far drafts survive
    bench_result.py the file that reports are made from
    run.py          `run_bench`: all of it
"""

from outrider.extras import check_lab

check_lab("bench")
