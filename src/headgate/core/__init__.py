"""What runs next: sequences, blocks, leases and the scheduler. Pure Python, one thread, no clock, no I/O."""
