"""Values of a step's plan and result."""

from __future__ import annotations

from headgate.protocol.plan import RoutedShape


def test_the_experts_of_a_token_take_one_id_per_choice_and_layer_with_experts():
    assert RoutedShape(layers=4, places=(1, 3), top=8, size=1).token_bytes == 16
    assert RoutedShape(layers=4, places=(0, 1, 2, 3), top=2, size=2).token_bytes == 16
