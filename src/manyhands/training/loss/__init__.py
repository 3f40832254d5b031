"""The loss of a job: sums with counts of their own, whether the parts of a batch add up to it, and NaN."""
