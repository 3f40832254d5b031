"""The parts of a captured CUDA graph: its nodes, its copies of arguments and results, its workspaces."""
