"""MXNet's hooks."""
