"""One file per architecture, read top to bottom; a registry that finds the right one for a checkpoint."""

from headgate.models.config import Config
from headgate.models.dense import DenseModel
from headgate.models.registry import ARCHITECTURES, build_model, read_spec, refuse_uneven, spec_of
from headgate.models.spec import ModelSpec

__all__ = [
    "ARCHITECTURES",
    "Config",
    "DenseModel",
    "ModelSpec",
    "build_model",
    "read_spec",
    "refuse_uneven",
    "spec_of",
]
