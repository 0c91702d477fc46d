"""Frameworks, routers and load generators that know SGLang or vLLM: their calls, in their order, with their payloads.

One file per framework. A payload is written as the framework sends it, with the fields that it does not need here too.
"""
