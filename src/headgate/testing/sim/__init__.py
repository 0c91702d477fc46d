"""A whole fleet in one process: the real router, servers, engines and their clients, on a clock that is made up.

Everything that decides runs as it does in production: `Router`, the ASGI app behind uvicorn's protocol, `Replicas`,
`EngineLoop`, the scheduler. What is simulated is the world below them: time, the network, processes, the device. One seed
decides all that happens there, so a run that went wrong can be had again, to the byte.

Layers, each knowing only those before it: `loop` (time and processes), `network` (bytes), `kv` (KV between engines),
`engine` (the engine process), `hosts` (servers and routers), `caller` (HTTP from outside), `script` (what clients want
and what is done to the fleet), `judge` (what clients may get), `deeds` (how it is done), `home` (what may be left),
`world` (one run). docs/testing.md says how to use it.
"""
