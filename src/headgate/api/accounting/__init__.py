"""Records of requests: the ledger, metrics, traces, and the data of the dashboard."""
