"""Training: data sets, models and the loops that use every device."""
