"""Studies of drafters: one file a study, and what they share. `benchmarks/studies.py` is their
command line.

    before_after, distil, acceptance, domain, traffic    the studies
    common, prompts, hard_labels                         training and measuring, texts, a recipe to compare with
    worked, kinds, report_worked                         worked solutions: docs/results/reasoning.md, kinds of step
    report, report_heads, report_stop, tables            docs/results/heads.md from the results
"""
