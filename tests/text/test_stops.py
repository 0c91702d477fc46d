from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from headgate.errors import RequestError
from headgate.text.detokenizer import Detokenizer
from headgate.text.stops import StopStrings
from headgate.text.tokenizer import Tokenizer

# Few letters, so that texts are full of stops, half stops and stops inside stops.
texts = st.text("ab", max_size=24)
some_stops = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)
cuts = st.lists(st.integers(0, 24), max_size=8)


def deltas(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def up_to_first_stop(text: str, stops: list[str], *, include: bool) -> str:
    """The expected output of `StopStrings`, computed by checking every prefix of the text."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[:end] if include else text[: end - max(map(len, ended))]
    return text


@seed(0)
@settings(max_examples=500, deadline=None, database=None)
@given(texts, some_stops, cuts, st.booleans())
def test_text_ends_at_the_first_stop_however_it_is_split(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    watcher = StopStrings(stops, include_stop=include)
    shown = "".join([watcher.push(delta) for delta in deltas(text, places)]) + watcher.finish()
    assert shown == up_to_first_stop(text, stops, include=include)
    assert (watcher.matched is not None) == any(stop in text for stop in stops)


@seed(1)
@settings(max_examples=500, deadline=None, database=None)
@given(texts, some_stops, cuts)
def test_only_a_prefix_of_a_stop_is_held_back(text: str, stops: list[str], places: list[int]) -> None:
    watcher, seen = StopStrings(stops), ""
    for delta in deltas(text, places):
        watcher.push(delta)
        seen += delta
        begins = [stop for stop in stops if stop.startswith(watcher.held) and stop != watcher.held]
        assert begins or not watcher.held
        assert watcher.matched is not None or seen.endswith(watcher.held)


def test_nothing_is_shown_after_a_stop() -> None:
    watcher = StopStrings(["\n\n"])
    assert [watcher.push(delta) for delta in ["one\n", "\ntwo", "three"]] == ["one", "", ""]
    assert watcher.matched == "\n\n"
    assert watcher.finish() == ""


def test_without_stops_text_passes_untouched() -> None:
    assert StopStrings([]).push("anything") == "anything"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError, match="must not be empty"):
        StopStrings(["ok", ""])


def test_a_stop_is_found_across_a_resume(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer, random = tokenizers_by_kind["byte_level"], Random(5)
    ids = tokenizer.encode("The dog. User: hello", add_special=False)
    for _ in range(50):
        at = random.randint(0, len(ids))
        first, stops = Detokenizer(tokenizer), StopStrings(["User:"])
        shown = "".join([stops.push(first.push([token_id])) for token_id in ids[:at]])
        if stops.matched is None:
            second, stops = (
                Detokenizer(tokenizer, generated=ids[:at], delivered_chars=len(shown)),
                StopStrings(["User:"]),
            )
            shown += "".join([stops.push(second.push([token_id])) for token_id in ids[at:]])
        assert (shown, stops.matched) == ("The dog. ", "User:")
