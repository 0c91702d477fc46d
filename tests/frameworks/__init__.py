"""Frameworks, routers and load generators that know SGLang or vLLM: their calls, in their order, with their payloads.

There is one file per framework. A payload has all fields that the framework sends, even those not needed here.
"""
