"""``with parallel():`` explicit tasks, ordered by the memory that they read and write. Imports no framework."""
