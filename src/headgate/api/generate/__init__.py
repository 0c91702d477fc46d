"""Generating endpoints: from a request body to choices, and from tokens to an OpenAI-compatible answer."""
