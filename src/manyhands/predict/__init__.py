"""What N devices would give in time and memory, from the measured step of one; pure Python, no framework."""
