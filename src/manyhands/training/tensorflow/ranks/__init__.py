"""The processes of a job, and how they find each other."""
