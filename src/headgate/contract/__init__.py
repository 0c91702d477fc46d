"""The HTTP contract: what servers, routers and clients agree on."""
