"""Rates and percentiles: growth is computed per source and is never negative."""

from __future__ import annotations

import random

import pytest

from headgate.dashboard.meter import Counts, Meter, grown, percentile, together


def test_growth_is_computed_field_by_field():
    then = Counts(tokens=5, aborts={"deadline": 1}, first_token=(1, 2))
    now = Counts(tokens=9, aborts={"deadline": 1, "pause": 3}, first_token=(1, 5))
    assert grown(now, then) == Counts(tokens=4, aborts={"pause": 3}, first_token=(0, 3))


def test_a_restarted_source_counts_from_zero():
    assert grown(Counts(tokens=3, first_token=(2,)), Counts(tokens=100, first_token=(7,))).tokens == 3
    assert grown(Counts(first_token=(2,)), Counts(first_token=(7,))).first_token == (2,)


def test_sums_take_histograms_of_any_length():
    both = together([Counts(tokens=1, first_token=(1, 1), aborts={"a": 1}), Counts(tokens=2, aborts={"a": 2})])
    assert both == Counts(tokens=3, first_token=(1, 1), aborts={"a": 3})


def test_a_new_source_has_no_growth():
    meter = Meter()
    meter.read(0.0, {"a": Counts(tokens=10)})
    meter.read(1.0, {"a": Counts(tokens=15), "b": Counts(tokens=1_000_000)})
    assert meter.step() == {"a": Counts(tokens=5)}


def test_a_source_missing_from_one_reading_grows_when_it_reappears():
    meter = Meter()
    meter.read(0.0, {"a": Counts(tokens=10)})
    meter.read(1.0, {})
    assert meter.step() == {"a": Counts()}
    meter.read(2.0, {"a": Counts(tokens=30)})
    assert meter.step() == {"a": Counts(tokens=20)}


def test_a_source_that_disappears_is_forgotten():
    meter = Meter(window_s=3)
    meter.read(0.0, {"a": Counts(tokens=1), "b": Counts(tokens=1)})
    for second in range(1, 5):
        meter.read(float(second), {"b": Counts(tokens=1)})
    assert set(meter.step()) == {"b"} and set(meter._seen_s) == {"b"}


def test_the_window_has_its_configured_length():
    meter = Meter(window_s=10)
    for second in range(60):
        meter.read(float(second), {"a": Counts(tokens=7 * second)})
    assert meter.window().tokens == 70
    assert meter.step_s == 1.0 and len(meter._readings) == 11


def test_one_reading_gives_no_rate():
    meter = Meter()
    assert meter.step() == {} and meter.step_s == 0
    meter.read(0.0, {"a": Counts(tokens=10)})
    assert meter.step() == {} and meter.window() == Counts()


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0), 0.5, None),
        ((), 0.99, None),
        ((4, 0, 0), 0.5, 0.5),
        ((0, 4, 0), 0.5, 1.5),
        ((1, 1, 0), 0.5, 1.0),
        ((1, 0, 3), 0.99, 2.0),  # beyond the last bound
    ],
)
def test_percentiles_are_interpolated_within_a_bucket(counts, share, expected):
    assert percentile((1.0, 2.0), counts, share) == expected


def test_percentiles_are_within_a_bucket_of_the_exact_ones():
    rng, bounds = random.Random(5), tuple(step / 50 for step in range(1, 100))
    values = sorted(min(rng.expovariate(4), 1.9) for _ in range(5000))
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[next(i for i, bound in enumerate(bounds) if value <= bound)] += 1
    for share in (0.5, 0.9, 0.99):
        assert percentile(bounds, counts, share) == pytest.approx(values[int(share * len(values)) - 1], abs=0.02)
