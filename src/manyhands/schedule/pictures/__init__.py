"""A schedule as a picture of its graph, and a run as a timeline; with the colours that all pictures share."""
