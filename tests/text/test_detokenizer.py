from __future__ import annotations

from random import Random

import pytest

from headgate.errors import RequestError
from headgate.text.detokenizer import REPLACEMENT, Detokenizer
from headgate.text.tokenizer import Tokenizer
from tests.text.conftest import word_piece

TEXTS = [
    "Hello, world! It doesn't stop.",
    "naïve café e\u0301 你好世界 こんにちは",
    "😀 👩‍👩‍👧 🇫🇷 family and flag",
    "  two spaces first\n\n\tand a tab",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


def cut(random: Random, ids: list[int]) -> list[list[int]]:
    """The ids in steps of one to three, as a server with speculative decoding would give them."""
    steps = []
    while ids:
        count = random.randint(1, 3)
        steps.append(ids[:count])
        ids = ids[count:]
    return steps


def streamed(detokenizer: Detokenizer, steps: list[list[int]]) -> str:
    return "".join([detokenizer.push(step) for step in steps]) + detokenizer.finish()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_deltas_add_up_to_the_decoded_text(tokenizer: Tokenizer, text: str, skip_special: bool) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    assert streamed(detokenizer, cut(Random(1), ids)) == tokenizer.decode(ids, skip_special=skip_special)


@pytest.mark.parametrize("skip_special", [True, False])
def test_deltas_add_up_for_ids_that_no_text_encodes_to(tokenizer: Tokenizer, skip_special: bool) -> None:
    random = Random(2)
    for _ in range(400):
        ids = [random.randrange(tokenizer.vocab_size + 2) for _ in range(random.randint(1, 24))]
        detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        expected = tokenizer.decode(ids, skip_special=skip_special)
        assert streamed(detokenizer, cut(random, ids)) == expected, ids


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_deltas_add_up_for_broken_bytes(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer, random = tokenizers_by_kind[kind], Random(3)
    one_byte = [i for i in range(tokenizer.vocab_size) if len(tokenizer.decode([i])) <= 1]
    for _ in range(400):
        ids = [random.choice(one_byte) for _ in range(random.randint(1, 12))]
        assert streamed(Detokenizer(tokenizer), cut(random, ids)) == tokenizer.decode(ids), ids


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_an_unfinished_character_waits_for_its_end(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("a🦊 b", add_special=False)
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push([token_id]) for token_id in ids]
    assert REPLACEMENT not in "".join(deltas)
    assert "".join(deltas) + detokenizer.finish() == "a🦊 b"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_an_unfinished_character_is_replaced_at_the_finish(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("a🦊", add_special=False)[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == "a"
    assert set(detokenizer.finish()) == {REPLACEMENT}


def test_a_special_token_inside_a_character_does_not_break_it(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    first, *rest = tokenizer.encode("🦊", add_special=False)
    assert streamed(Detokenizer(tokenizer), [[first], [tokenizer.eos_id], rest]) == "🦊"


@pytest.mark.parametrize("kind", ["byte_fallback", "word_piece", "metaspace"])
def test_after_a_prompt_the_first_word_keeps_its_space(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("Hello world", add_special=False)
    prompt = tokenizer.encode("Hello", add_special=False)
    assert ids[: len(prompt)] == prompt
    detokenizer = Detokenizer(tokenizer, prompt_ids=prompt)
    assert streamed(detokenizer, [[token_id] for token_id in ids[len(prompt) :]]) == " world"


def test_a_stream_resumed_at_any_token_continues_exactly(tokenizer: Tokenizer) -> None:
    random = Random(4)
    ids = tokenizer.encode("Hello 😀 café 你好, it doesn't stop") + [
        random.randrange(tokenizer.vocab_size) for _ in range(9)
    ]
    prompt = tokenizer.encode("world")
    whole = streamed(Detokenizer(tokenizer, prompt_ids=prompt), [ids])
    for at in range(len(ids) + 1):
        first = Detokenizer(tokenizer, prompt_ids=prompt)
        before = "".join([first.push([token_id]) for token_id in ids[:at]])
        lost = random.randint(0, min(3, len(before)))  # text that stop strings held back, say
        delivered = before[: len(before) - lost]
        second = Detokenizer(tokenizer, prompt_ids=prompt, generated=ids[:at], delivered_chars=len(delivered))
        assert delivered + streamed(second, [[token_id] for token_id in ids[at:]]) == whole


def test_more_delivered_text_than_the_ids_make_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="9999 characters"):
        Detokenizer(tokenizer, generated=tokenizer.encode("Hello"), delivered_chars=9999)


class CountingBackend:
    """A backend that records the largest number of ids it had to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decoder = tokenizer.backend.decoder
        self._decode = tokenizer.backend.decode
        self.most = 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.most = max(self.most, len(ids))
        return self._decode(ids, skip_special_tokens=skip_special_tokens)


def test_the_work_per_token_does_not_grow_with_the_stream() -> None:
    tokenizer = word_piece()
    tokenizer.backend = backend = CountingBackend(tokenizer)
    detokenizer = Detokenizer(tokenizer)
    for token_id in range(200):
        detokenizer.push([token_id])
    assert 1 < backend.most < 10


def test_ids_that_do_not_exist_are_not_cached(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    for kind, remembered in (("byte_level", "_bytes_of"), ("byte_fallback", "_piece_of")):
        detokenizer = Detokenizer(tokenizers_by_kind[kind])
        assert detokenizer.push(range(10**6, 10**6 + 1000)) + detokenizer.finish() == ""
        table = getattr(detokenizer._decoding, remembered).__self__
        assert all(token < tokenizers_by_kind[kind].vocab_size for token in table)
