"""From tasks to a schedule over lanes: planned, checked, simulated, drawn. Pure: no framework, no state."""
