"""The live dashboard page and its event stream. `api` and `router` supply the data, once a second."""
