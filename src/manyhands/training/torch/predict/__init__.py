"""Measurements for a prediction: the step of one device, and the link between devices."""
