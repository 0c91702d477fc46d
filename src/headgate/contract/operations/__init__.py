"""The operations of the HTTP API, one value each. Routes, access control, OpenAPI and the reference derive from them."""
