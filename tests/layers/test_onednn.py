"""A virtual machine that announces AMX and hides its tiles: the first bf16 product must not end the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headgate.layers import onednn

PRODUCT = """
from headgate.layers.onednn import avoid_hidden_tiles
avoid_hidden_tiles()
import torch
print((torch.ones(8, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)).sum().item())
"""


def test_a_product_of_bfloat16_is_computed_on_this_machine():
    environ = {name: value for name, value in os.environ.items() if name != onednn.LIMIT}
    run = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    assert float(run.stdout) == 8 * 64 * 64


@pytest.mark.parametrize(
    ("announced", "palettes", "given", "limit"),
    [
        (True, 0, None, onednn.BELOW_AMX),
        (True, 1, None, None),
        (True, None, None, None),  # it cannot be queried
        (False, 0, None, None),
        (True, 0, "AVX2", "AVX2"),
    ],
)
def test_only_hidden_tiles_set_the_limit_and_a_user_limit_is_kept(monkeypatch, announced, palettes, given, limit):
    monkeypatch.setattr(onednn, "_announces_amx", lambda: announced)
    monkeypatch.setattr(onednn, "_palettes", lambda: palettes)
    monkeypatch.delenv(onednn.LIMIT, raising=False)
    if given is not None:
        monkeypatch.setenv(onednn.LIMIT, given)
    onednn.avoid_hidden_tiles()
    assert os.environ.get(onednn.LIMIT) == limit


def test_the_number_of_tile_palettes_can_be_queried():
    assert onednn._palettes() in (None, 0, 1, 2)
