"""Checksums of the weights that a model holds, as they lie in memory.

They depend on the layout of the backend: equal for engines of the same configuration with the same weights, and before
and after an update with the same weights. They are not the checksums of the checkpoint's tensors.
"""

from __future__ import annotations

import hashlib

import torch

from headgate.device.weights.loading import Loadable


def checksums(model: Loadable) -> dict[str, str]:
    """SHA-256 in hex by checkpoint name. Names that share a fused matrix have its checksum."""
    digests: dict[int, str] = {}  # by the address of the tensor, so that a fused matrix is read once
    found = {}
    for name, parameter in model.parameters():
        place = parameter.tensor.data_ptr()
        if place not in digests:
            digests[place] = digest(parameter.tensor, parameter.scale)
        found[name] = digests[place]
    return found


def digest(*tensors: torch.Tensor | None) -> str:
    sha256 = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            sha256.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()
