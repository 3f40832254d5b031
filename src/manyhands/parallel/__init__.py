"""``parallel(fn)``: plan a function, choose the fastest way to run it, explain the choice. Imports no framework."""
