"""One address for a fleet: places requests on workers, relays their answers, and resumes them when a worker fails."""
