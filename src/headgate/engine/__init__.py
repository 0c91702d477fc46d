"""When: the loop around the core, and the way to talk to it."""
