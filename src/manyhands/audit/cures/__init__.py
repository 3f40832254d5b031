"""Cures: what to write instead of a line that waits, made from the syntax tree around it."""
