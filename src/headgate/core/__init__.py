"""The scheduler and its state: sequences, KV blocks, leases. Pure Python: one thread, no clock, no I/O."""
