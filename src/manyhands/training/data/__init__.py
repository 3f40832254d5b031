"""Samples: where they come from, in which order, and Fashion-MNIST."""
