"""The values that cross a thread, process or machine boundary.

Structs are positional on the wire and append-only: a new field goes last and has a default. This package imports only
the sampling parameters of `contract`.
"""
