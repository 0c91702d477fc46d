"""Plans in, tokens out: owns the device, its rows, its KV tensors and its weights. Decides nothing."""
