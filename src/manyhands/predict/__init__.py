"""Predicts time and memory on N devices from a measured step of one device; pure Python, no framework."""
