"""How KV moves from one engine to another. Knows blocks, leases and bytes; never sequences, tokens or words."""
