"""How far results are from exact ones, computed in float64: for benchmarks and tests on GPUs."""
