"""The data path: client and worker connections, request heads, and the compiled fast path."""
