"""A schedule as a picture of its graph, and a run as a timeline."""
