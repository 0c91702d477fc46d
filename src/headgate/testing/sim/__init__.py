"""Deterministic simulation of a whole fleet in one process, on virtual time.

All code that makes decisions is the production code: `Router`, the ASGI app behind uvicorn's protocol, `Replicas`,
`EngineLoop` and the scheduler. The environment below it is simulated: time, the network, processes and the device.
One seed determines everything that happens in the environment, so a failing run can be reproduced byte for byte.

Layers, each of which imports only earlier ones: `loop` (time and processes), `network` (connections), `kv` (KV transfer
between engines), `engine` (the engine process), `hosts` (servers and routers), `caller` (the HTTP client), `script` and
`hostile` (the plan of a run), `judge` (allowed answers), `contract_rules` and `leaks` (further checks), `fleet` (the
hosts of a run), `actions` and `hostile_actions` (how planned actions are carried out), `world` (one run). docs/testing.md
explains how to use it.
"""
