"""Control endpoints of a router: fan-out of control calls, aborts, membership, status and metrics."""
