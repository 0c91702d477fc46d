"""Fault injection into a fleet of real processes on this machine.

`plan` draws the faults from a seed, `actions` injects them, `proxy` carries the bytes between the router and the
servers, `load` sends requests, and `judge` compares every answer with that of an undisturbed server. `docs/chaos.md`
lists the checks.
"""
