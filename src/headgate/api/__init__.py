"""How HTTP sees it: the OpenAI-compatible face of one group of engines, and its control plane."""
