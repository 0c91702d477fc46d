"""The HTTP edge: code that servers and routers share to accept requests and send answers."""
