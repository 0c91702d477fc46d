"""One address for a fleet: places requests on workers, relays answers, and resumes them when a worker fails."""
