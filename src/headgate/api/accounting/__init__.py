"""Records of requests: the ledger, metrics, traces, and the dashboard's view of them."""
