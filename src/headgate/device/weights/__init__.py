"""Weight sources (files, GGUF, CUDA IPC, broadcast) and loading them into a model."""
