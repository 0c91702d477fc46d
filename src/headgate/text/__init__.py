"""Tokenizer, chat template, incremental detokenizer, stop strings, tool calls. The only package that handles text."""
