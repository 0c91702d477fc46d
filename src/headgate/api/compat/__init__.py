"""APIs that are compatible with vLLM and SGLang. They translate calls to our own operations and make no decisions."""
