"""How on the device, piece by piece: attention, linear, norm, rotary, and the backends that make them fast.

Layers know tensors and the paged cache; they know nothing of requests.
"""
