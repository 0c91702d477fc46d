"""Benchmarks: load generators that call any server over HTTP, as clients do. They do not import the engine."""
