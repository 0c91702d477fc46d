"""Test tools that are part of the product: a fake device, tiny models, a manual clock, simulation, chaos tests."""
