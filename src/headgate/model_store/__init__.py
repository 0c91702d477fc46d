"""Finds models: a local folder, a GGUF file, the default model, or the Hugging Face cache. No torch."""
