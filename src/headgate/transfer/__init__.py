"""KV transfer between engines. Handles blocks, leases and bytes; has no notion of sequences."""
