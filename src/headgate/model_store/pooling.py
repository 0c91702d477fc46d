"""How a checkpoint for sentence-transformers pools hidden states: `1_Pooling/config.json`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Final, Literal

log = logging.getLogger(__name__)

CONFIG: Final = "1_Pooling/config.json"
LAST: Final = "lasttoken"
MEAN: Final = "mean"
PREFIX: Final = "pooling_mode_"
# Older files have a flag for each mode, newer ones a name.
FLAGS: Final = {PREFIX + LAST: LAST, PREFIX + "mean_tokens": MEAN}


def read_pooling(model: Path) -> Literal["last", "mean"] | None:
    """The pooling that the model in `model` was trained with; None if it does not say, or says another one."""
    try:
        config = json.loads((model / CONFIG).read_bytes())
    except OSError:
        return None  # a model for generation, or a GGUF file
    except ValueError as error:
        log.warning("%s cannot be read: %s", model / CONFIG, error)
        return None
    modes = _modes(config)
    if modes == [LAST]:
        return "last"
    if modes == [MEAN]:
        return "mean"
    log.warning("%s asks for pooling %s; only %s and %s are implemented", model / CONFIG, modes, LAST, MEAN)
    return None


def _modes(config: Any) -> list[str]:
    if not isinstance(config, dict):
        return []
    if isinstance(named := config.get("pooling_mode"), str):
        return [named]
    flags: list[str] = [name for name, value in config.items() if name.startswith(PREFIX) and value is True]
    return [FLAGS.get(name, name) for name in flags]
