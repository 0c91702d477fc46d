"""The operations of the HTTP API, one value each; routes, access control, OpenAPI and the reference follow from them."""
