"""The HTTP edge: what servers and routers share in how they take requests and send answers."""
