"""Benchmarks: load generators that use any server over HTTP, as its clients do. They import nothing of the engine."""
