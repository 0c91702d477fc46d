"""The vector of a prompt as an array, as a client wants it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


def read_vector(data: bytes, dimensions: int | None = None, *, normalised: bool = True) -> Vector:
    """The first `dimensions` numbers of a vector from an engine, of length 1 if `normalised`.

    Models that are trained for it have the most important numbers first (Matryoshka embeddings).
    """
    vector = np.frombuffer(data, "<f4")[:dimensions]
    return unit(vector) if normalised else vector


def unit(vector: Vector) -> Vector:
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype(np.float32) if length else vector
