"""The loss of a job: sums with their counts, whether the parts of a batch add up to it, and NaN."""
