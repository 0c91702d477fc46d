"""One short file per architecture, and a registry that finds the right one for a checkpoint."""

from headgate.models.config import Config
from headgate.models.decoder import Decoder
from headgate.models.network import Network
from headgate.models.registry import ARCHITECTURES, Architecture, build_model, read_spec, refuse_uneven, spec_of
from headgate.models.spec import ModelSpec

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Config",
    "Decoder",
    "ModelSpec",
    "Network",
    "build_model",
    "read_spec",
    "refuse_uneven",
    "spec_of",
]
