"""How layers with and without attention windows share KV blocks."""

from __future__ import annotations

import pytest

from headgate.models.kv_layout import MOST_GROUPS, KvLayout, kv_layout
from headgate.protocol.groups import LayerGroups

CONTEXT, BATCH, BLOCK_SIZE = 131_072, 8192, 32

GPT_OSS = [128, None] * 12
GEMMA_2 = [4096, None] * 21
GEMMA_3 = ([1024] * 5 + [None]) * 8
MISTRAL = [4096] * 32


def tokens_held(windows: list[int | None], context: int) -> float:
    """Tokens of one layer whose KV a sequence holds while it generates an answer, for each layer of the model."""
    layout = kv_layout(windows)
    groups = LayerGroups(BLOCK_SIZE, layout.windows)
    blocks = groups.most_blocks(groups.stripes_for(context), 1)
    return blocks * BLOCK_SIZE * layout.caches / len(windows)


def test_a_model_without_windows_has_one_group():
    layout = kv_layout([None] * 3)
    assert layout == KvLayout((None,), ((0, 0), (0, 1), (0, 2))) and layout.caches == 3


def test_layers_of_two_kinds_share_the_caches():
    layout = kv_layout([8, None, 8, None])
    assert layout == KvLayout((None, 8), ((1, 0), (0, 0), (1, 1), (0, 1))) and layout.caches == 2


@pytest.mark.parametrize("windows", [GPT_OSS, GEMMA_2, GEMMA_3, MISTRAL, [None, 4, 9], [5, 5, None, 5]])
def test_each_layer_has_a_place_of_its_own_in_a_group_of_its_window(windows):
    layout = kv_layout(windows)
    assert len(set(layout.places)) == len(windows)
    assert [layout.windows[place.group] for place in layout.places] == windows
    assert len(layout.windows) <= MOST_GROUPS


@pytest.mark.parametrize(("windows", "widest"), [([None] + [4] * 20, None), ([4, *[9] * 20], 9)])
def test_a_model_of_too_many_groups_has_one_that_keeps_what_any_layer_sees(windows, widest):
    layout = kv_layout(windows)
    assert layout.windows == (widest,) and layout.caches == len(windows)


@pytest.mark.parametrize(("windows", "most"), [(GPT_OSS, 0.51), (GEMMA_2, 0.52), (GEMMA_3, 0.18), (MISTRAL, 0.04)])
def test_a_long_sequence_holds_a_fraction_of_its_kv(windows, most):
    assert tokens_held(windows, CONTEXT) / CONTEXT < most
