"""Tensor parallelism: one model on several ranks. The processes, their communication, and their executors."""
