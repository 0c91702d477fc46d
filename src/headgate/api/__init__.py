"""The HTTP server in front of a group of engines: an OpenAI-compatible API and a control plane."""
