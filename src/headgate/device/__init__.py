"""Runs plans and returns tokens. Owns the device, its rows, its KV tensors and its weights. Decides nothing."""
