"""Where a job ends: limits of steps and time, signals, and how much of the data is used."""
