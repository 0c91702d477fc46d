"""The live page: what it shows, once a second, to whoever watches. What there is to show is told by `api` and `router`."""
