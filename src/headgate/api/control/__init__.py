"""Control endpoints of a server: abort, pause, resume, weight updates, sleep, health, request status."""
