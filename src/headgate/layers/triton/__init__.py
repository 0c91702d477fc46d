"""Kernels in Triton, for CUDA devices. Each module has kernels and the functions that launch them.

This package is never imported on a machine without Triton: `layers.choice` and `device.build` import it only for a
CUDA device. Rules: a launch reads nothing from the device and allocates only through torch, so that a graph can
capture it. Sums are in float32. Heads whose size is not a power of two are padded inside a kernel, never in memory.
"""
