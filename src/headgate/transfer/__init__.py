"""KV transfer between engines. Handles blocks, leases and bytes, but no sequences."""
