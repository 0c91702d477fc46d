"""The HTTP contract between servers, routers and clients: values and pure functions, declared once."""
