"""Studies of trained drafters: one file a study, and what they share. `benchmarks/studies.py` is their command line.

    before_after, distil, acceptance, domain, traffic    the studies
    common, prompts, hard_labels                         training and measuring, texts, a recipe to compare with
    report, report_heads, report_stop, tables            docs/heads.md from the results
"""
