"""The functions and classes of the textbook's chapters, in every framework."""
