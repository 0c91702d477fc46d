"""Headgate: an LLM serving system whose running requests can be stopped, held, moved and resumed."""
