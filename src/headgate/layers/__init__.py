"""Building blocks of models: attention, linear layers, norms, rotary embedding, and the backends that compute them.

Layers handle tensors and the paged cache; they have no notion of requests.
"""
