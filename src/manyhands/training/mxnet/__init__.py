"""Training with MXNet (Gluon)."""
