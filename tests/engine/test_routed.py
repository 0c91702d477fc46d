"""The experts of an answer, assembled from the reports of engines."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from headgate.engine import routed as routed_module
from headgate.engine.routed import AnswerExperts, RoutedTokens
from headgate.protocol.plan import RoutedExperts, RoutedShape

SHAPE = RoutedShape(layers=1, places=(0,), top=2, size=1)


def report(start: int, *tokens: int) -> RoutedExperts:
    return RoutedExperts(start, bytes(id for token in tokens for id in (token, token + 1)))


def firsts(experts: AnswerExperts | None) -> list[int] | None:
    return None if experts is None else experts.array()[:, 0, 0].tolist()


def test_the_first_report_of_a_position_counts():
    routed = RoutedTokens(SHAPE, 0)
    routed.add([report(0, 10, 11, 12), report(3, 13)])
    routed.add([report(0, 20, 21), report(2, 22, 23, 24)])  # preempted, or in another engine
    assert firsts(routed.of_answer(6)) == [10, 11, 12, 13, 24]


def test_an_answer_has_those_of_all_its_tokens_but_the_last_or_none():
    routed = RoutedTokens(SHAPE, 0)
    assert firsts(routed.of_answer(1)) == [] and routed.of_answer(2) is None
    routed.add([report(0, 10, 11, 12)])
    assert firsts(routed.of_answer(3)) == [10, 11]  # a stop string ended it; the engine was ahead
    assert firsts(routed.of_answer(4)) == [10, 11, 12] and routed.of_answer(5) is None


def test_a_gap_is_a_bug():
    routed = RoutedTokens(SHAPE, 2)
    routed.add([report(2, 12)])
    with pytest.raises(AssertionError, match="the experts of 1 tokens before position 4 are missing"):
        routed.add([report(4, 14)])


def test_two_bytes_per_expert_and_layers_without_experts():
    ids = np.array([[[300, 1]], [[2, 40000]]], "<u2")
    experts = AnswerExperts(RoutedShape(layers=3, places=(1,), top=2, size=2), ids.tobytes())
    assert experts.array().tolist() == [[[0, 0], [300, 1], [0, 0]], [[0, 0], [2, 40000], [0, 0]]]


def test_long_answers_are_encoded_in_parts(monkeypatch):
    experts = AnswerExperts(SHAPE, bytes(range(200)))
    whole = experts.npy(), experts.int32()
    monkeypatch.setattr(routed_module, "PART_BYTES", 9)
    assert (experts.npy(), experts.int32()) == whole
    assert np.frombuffer(base64.b64decode(whole[1]), np.int32).tolist() == list(range(200))
