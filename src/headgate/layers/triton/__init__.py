"""Kernels in Triton, for CUDA devices: each module holds a kernel and the function that launches it.

Nothing here is imported on a machine without Triton; `layers.choice` and `worker.build` import it when they are given
a CUDA device. Rules: a launch reads nothing from the device and allocates only through torch, so that a graph can
capture it; sums are in float32; heads whose size is no power of two are padded inside a kernel, never in memory.
"""
