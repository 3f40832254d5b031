"""MXNet: its contexts, how functions are handed to its engine, and what explicit tasks need of it."""
