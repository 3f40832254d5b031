"""``parallel(fn)``: plan a function, choose the fastest method, explain the choice. Imports no framework."""
