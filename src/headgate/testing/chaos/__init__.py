"""A real fleet on this machine, broken on purpose: processes killed and stopped, bytes lost, disks and descriptors gone.

`plan` draws what goes wrong from a seed, `deeds` does it, `proxy` stands between router and servers, `load` asks, and
`judge` compares what every client was told with an undisturbed run. `docs/chaos.md` says what is checked.
"""
