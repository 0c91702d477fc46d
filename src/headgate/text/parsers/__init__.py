"""Parsers of answers: they separate reasoning, content and tool calls, one module per grammar."""
