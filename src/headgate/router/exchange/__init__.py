"""One routed request: its state table, the relay that acts on it, attempts, retries and resumption."""
