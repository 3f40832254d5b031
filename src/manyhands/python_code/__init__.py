"""Python code as data: the names in it, and functions written at run time."""
