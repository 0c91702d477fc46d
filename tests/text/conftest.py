"""One tokenizer of each common kind, small enough to train in a test."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from headgate.text.tokenizer import Tokenizer

CORPUS = [
    "Hello, world! The quick brown fox doesn't jump over the lazy dog.",
    "naïve café, e\u0301 combining, 你好世界, こんにちは, 😀 👩‍👩‍👧 🇫🇷",
    "def f(x):\n    return x ** 2  # two spaces\n\n",
] * 5
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")


def byte_fallback() -> Tokenizer:
    """A tokenizer like those of Llama 2 and Mistral: pieces with ▁ for spaces, and a token for every byte."""
    trained = Backend(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = [text for text in CORPUS if text.isascii()]
    trained.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    )
    merges = [tuple(merge) for merge in _model(trained)["merges"]]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(set(trained.get_vocab()) - {"<unk>"})]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIALS)
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")


def word_piece() -> Tokenizer:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    )
    backend.add_special_tokens(SPECIALS)
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")


def metaspace() -> Tokenizer:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False),
    )
    backend.add_special_tokens(SPECIALS)
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")


def _model(backend: Backend) -> dict:
    import json

    return json.loads(backend.to_str())["model"]


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "word_piece": word_piece, "metaspace": metaspace}


@pytest.fixture(scope="session")
def tokenizers_by_kind() -> dict[str, Tokenizer]:
    return {kind: build() for kind, build in KINDS.items()}


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    """A tokenizer of each kind in turn."""
    return tokenizers_by_kind[request.param]
