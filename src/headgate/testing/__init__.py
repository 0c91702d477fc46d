"""Fakes that are part of the product: the fake device, tiny models, a clock you turn by hand."""
