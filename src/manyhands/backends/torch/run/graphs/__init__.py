"""What a captured CUDA graph is made of: its nodes, its copies of arguments and results, its workspaces."""
