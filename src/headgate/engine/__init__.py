"""The engine process: the step loop around the core, its control commands, and the clients that talk to it."""
