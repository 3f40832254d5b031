"""``manyhands lab``: the textbook's experiments and exercises on this machine, as tables, plots and one report.

An experiment uses the public verbs, as any program does.
"""
