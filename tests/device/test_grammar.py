from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from headgate.contract.sampling import SamplingParams
from headgate.device.sampling.grammar import Grammars, read_vocabulary, unpack
from headgate.protocol.plan import Join, StepPlan
from headgate.testing.tiny import write_tokenizer

VOCAB, EOS = 300, 256  # forty ids more than the tokenizer has, as models pad their vocabularies


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def grammars(tokenizer) -> Grammars:
    vocabulary = read_vocabulary(tokenizer.to_str(), vocab_size=VOCAB, eos_ids=(EOS, 258, 10**6))
    assert vocabulary is not None
    return Grammars(vocabulary)


def seat(grammars: Grammars, row: int, grammar: str | None, answer: list[int]) -> None:
    join = Join(row, (1, 2, *answer), 2, SamplingParams(grammar=grammar), ())
    grammars.apply(StepPlan(0, 0, [], [], [], [], joins=(join,)))


def allowed(grammars: Grammars, *rows: int) -> list[list[int]]:
    logits = torch.zeros(len(rows), VOCAB)
    grammars.forbid(logits, np.array(rows))
    return [torch.nonzero(row == 0).view(-1).tolist() for row in logits]


def test_a_grammar_constrains_its_own_row_only(grammars, tokenizer):
    seat(grammars, 3, "start: /[ab]c/", [])
    a, b, c = tokenizer.encode("abc").ids
    assert allowed(grammars, 1, 3) == [list(range(VOCAB)), sorted([a, b])]
    assert grammars.advance(np.array([1, 3]), [7, b]) == ()
    assert allowed(grammars, 3) == [[c]]
    assert grammars.hold_any(np.array([1, 3])) and not grammars.hold_any(np.array([1, 2]))


def test_every_eos_is_allowed_where_the_grammar_may_end_and_alone_where_it_must(grammars, tokenizer):
    seat(grammars, 0, "start: /ab?/", tokenizer.encode("a").ids)
    seat(grammars, 1, "start: /ab?/", tokenizer.encode("ab").ids)
    seat(grammars, 2, "start: /ab?/", [])
    may, must, not_yet = allowed(grammars, 0, 1, 2)
    assert may == sorted([*tokenizer.encode("b").ids, EOS, 258])
    assert must == [EOS, 258] and not {EOS, 258} & set(not_yet)


def test_a_row_drops_its_grammar_when_another_sequence_joins(grammars):
    seat(grammars, 0, "start: /a/", [])
    seat(grammars, 0, None, [])
    assert allowed(grammars, 0) == [list(range(VOCAB))]
    assert grammars.advance(np.array([0]), [7]) == ()


@pytest.mark.parametrize("token", [7, EOS])
@pytest.mark.parametrize(("grammar", "answer"), [("start: (", []), ("start: /a+/", [7]), ("start: /a+/", [])])
def test_only_the_row_that_cannot_follow_its_grammar_is_lost(grammars, tokenizer, grammar, answer, token):
    seat(grammars, 0, grammar, answer)
    seat(grammars, 1, "start: /b/", [])
    assert allowed(grammars, 0, 1)[1] == tokenizer.encode("b").ids
    assert grammars.advance(np.array([0, 1]), [token, *tokenizer.encode("b").ids]) == (0,)


def test_one_grammar_is_compiled_once_and_its_rows_stay_apart(grammars, tokenizer):
    seat(grammars, 0, "start: /ab/", [])
    seat(grammars, 1, "start: /ab/", [])
    a, b = tokenizer.encode("ab").ids
    assert grammars.advance(np.array([0]), [a]) == ()
    assert allowed(grammars, 0, 1) == [[b], [a]]
    assert grammars._compiled.cache_info().misses == 1


def test_a_tokenizer_may_have_more_tokens_than_the_model(tokenizer):
    vocabulary = read_vocabulary(tokenizer.to_str(), vocab_size=257, eos_ids=(EOS,))
    grammars = Grammars(vocabulary)
    seat(grammars, 0, "start: /a/", [])
    logits = torch.zeros(1, 257)
    grammars.forbid(logits, np.array([0]))
    assert torch.nonzero(logits[0] == 0).view(-1).tolist() == tokenizer.encode("a").ids


def test_grammars_need_an_eos_token_and_a_supported_tokenizer(tokenizer, caplog):
    assert read_vocabulary(tokenizer.to_str(), vocab_size=VOCAB, eos_ids=()) is None
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert read_vocabulary(words.to_str(), vocab_size=2, eos_ids=(1,)) is None
    assert json.loads(words.to_str())["model"]["type"] == "WordLevel" and "grammars are not supported" in caplog.text


def bits(device: str) -> torch.Tensor:
    masks = np.array([[5, -1, 0], [1 << 31 - 1, 0, 7]], dtype=np.int32)
    return unpack(masks, 70, torch.device(device)).cpu()


def test_masks_are_unpacked_from_the_lowest_bit():
    assert torch.nonzero(bits("cpu")[0]).view(-1).tolist() == [0, 2, *range(32, 64)]
    assert torch.nonzero(bits("cpu")[1]).view(-1).tolist() == [30, 64, 65, 66]


@pytest.mark.gpu
def test_masks_are_unpacked_on_a_gpu_as_on_the_host():
    assert torch.equal(bits("cuda"), bits("cpu"))
