"""From tasks to a schedule over lanes, checked, simulated and explained. Imports no framework."""
