"""The fastest way to compute each convolution: one of cuDNN's plans, a matrix product, or PyTorch's default.

PyTorch uses the plan that cuDNN's heuristics rank first. cuDNN has dozens for each convolution, and the best is often
faster: eight times for a strided 1x1 convolution on an H200. So each convolution of a step is a problem
(:mod:`.problems`) for which ways are tried (:mod:`.cudnn_plans`, :mod:`.products`), compared with PyTorch's result and
timed (:mod:`.choice`). Two operations that replace PyTorch's (:mod:`.operations`) use the winner, which is stored on
disk.
"""
