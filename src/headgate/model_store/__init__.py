"""Finding models: a local folder, a GGUF file, the default model, the hub's cache. No torch."""
