"""One address for a fleet: which worker gets a request, how its bytes come back, and who goes on when a worker dies."""
