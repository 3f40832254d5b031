"""``manyhands lab``: the textbook's experiments and exercises on this machine, as tables, plots and one report.

It is built on the doors: an experiment uses the public verbs, as any program does.
"""
