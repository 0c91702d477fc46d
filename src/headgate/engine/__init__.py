"""The engine process: the step loop around the scheduler, its control commands, and the clients that call it."""
