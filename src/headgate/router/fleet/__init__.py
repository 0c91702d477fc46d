"""The fleet as the router sees it: workers, health, placement policies and the prefix index."""
