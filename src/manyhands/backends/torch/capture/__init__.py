"""From a function and its arguments to a trace, or to the reason why there is none."""
