"""Which role runs on which devices, and with which mesh. No module in this package imports JAX.

The strategies are those of "Adaptive Placement and Parallelism for RLHF" (arXiv 2312.11819): flat, interleave and separate, and
custom for entries of the user.
"""
