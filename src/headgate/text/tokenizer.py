"""Converts text to token ids and back, with the tokenizer of the model.

A folder with a tokenizer.json is read by the `tokenizers` library alone, and so is a GGUF file with a byte-level
vocabulary: both take tenths of a second. Anything else (a bare sentencepiece model, other GGUF vocabularies) is
loaded by `transformers`, which is imported only then.

Decoded text is the output of the tokenizer's own decoder. The `clean_up_tokenization_spaces` that `transformers` can
apply afterwards is not supported: it changes the model's text and cannot be streamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from headgate.errors import BrokenCheckpoint, ContextTooLong, HeadgateError, UnsupportedModel
from headgate.model_store.gguf import GGUFFile, read_gguf
from headgate.text.bounds import longest_token
from headgate.text.gguf import byte_level_backend

# Files that show that a folder without tokenizer.json has a tokenizer that `transformers` can build.
SLOW_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")

PIECE_CHARS = 1 << 16  # a long text is counted in pieces of this size; each takes tenths of a second
# Typical characters per token. A text with more characters per allowed token is counted before it is encoded.
USUAL_CHARS = 4
UNBOUNDED_CHARS = 256  # most characters per allowed token, for tokenizers without a bound on a token's length
CUT_TOKENS = 64  # maximum number of tokens that splitting a text can add


class Tokenizer:
    """A `tokenizers` backend, and its BOS and EOS tokens. Safe to share between threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        # A length limit or padding saved with the tokenizer was for training; a prompt is never truncated silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_id = None if bos_token is None else backend.token_to_id(bos_token)
        self.eos_id = None if eos_token is None else backend.token_to_id(eos_token)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.longest = longest_token(backend)

    def __repr__(self) -> str:
        return f"<Tokenizer {self.vocab_size} tokens, bos {self.bos_id}, eos {self.eos_id}>"

    @cached_property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the ids of `text`; `add_special` adds the checkpoint's tokens for both ends (usually BOS)."""
        # The backend's `encode` holds the GIL while it works, so a long prompt would block all other requests.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoding.ids)

    def encode_within(self, text: str, most: int, *, add_special: bool = True) -> list[int]:
        """Return the ids of `text`. If there are more than `most`, raise ContextTooLong before spending much work."""
        self.check_length(len(text), most)
        if len(text) > max(most * USUAL_CHARS, PIECE_CHARS):
            self._count(text, most)
        return self.encode(text, add_special=add_special)

    def check_length(self, chars: int, most: int) -> None:
        """Refuse a text whose length alone shows that it has more than `most` tokens."""
        if chars <= most * (self.longest or UNBOUNDED_CHARS):
            return
        if self.longest is not None:
            raise too_long(-(-chars // self.longest), most)
        raise ContextTooLong(
            f"prompt has {chars} characters; the maximum for {most} tokens is {most * UNBOUNDED_CHARS}",
            param="prompt",
        )

    def _count(self, text: str, most: int) -> None:
        """Raise ContextTooLong as soon as the first pieces of `text` have more than `most` tokens."""
        tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            tokens += len(self.encode(text[start : start + PIECE_CHARS], add_special=False)) - CUT_TOKENS
            if tokens > most:
                raise too_long(tokens, most)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special)


def too_long(tokens: int, most: int) -> ContextTooLong:
    return ContextTooLong(f"prompt has at least {tokens} tokens; this model takes {most}", param="prompt")


def load_tokenizer(model: Path) -> Tokenizer | None:
    """Return the tokenizer of a model folder or GGUF file; None if it has none, so that only token ids are served."""
    try:
        return _load(model)
    except HeadgateError:
        raise
    except (
        Exception
    ) as error:  # `tokenizers` raises bare Exception, and a file may contain any type where text is expected
        raise BrokenCheckpoint(f"the tokenizer of {model} is malformed: {error!r:.200}") from error


def _load(model: Path) -> Tokenizer | None:
    if model.is_file():
        return _from_gguf(read_gguf(model))
    config = read_json(model / "tokenizer_config.json")
    if (model / "tokenizer.json").is_file():
        return _from_json(model / "tokenizer.json", config)
    if any((model / name).is_file() for name in SLOW_TOKENIZER_FILES):
        return _from_transformers(model)
    return None


def _from_json(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BrokenCheckpoint(f"{path} is not a tokenizer: {error}") from error
    _add_missing_tokens(backend, config.get("added_tokens_decoder", {}))
    # The post-processor in the file decides which special tokens `encode` adds; `add_bos_token` in the config does
    # not. `transformers` does the same, so a prompt has the same ids in both.
    return Tokenizer(
        backend, bos_token=_content(config.get("bos_token")), eos_token=_content(config.get("eos_token"))
    )


def _add_missing_tokens(backend: tokenizers.Tokenizer, listed: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the tokens that only tokenizer_config.json defines, in the order of their ids."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    options = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            flags = {option: token[option] for option in options if option in token}
            backend.add_tokens([tokenizers.AddedToken(token["content"], **flags)])


def _set_ends(tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool) -> None:
    """Make `encode` add BOS and EOS, or not, regardless of the backend's setting."""
    before = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
    after = [tokenizer.eos_id] if add_eos and tokenizer.eos_id is not None else []
    # The pattern uses the names `bos` and `eos`, because a token's text may contain a space or a colon.
    pattern = " ".join([*("bos" for _ in before), "$A", *("eos" for _ in after)])
    tokenizer.backend.post_processor = TemplateProcessing(
        single=pattern,
        pair=f"{pattern} $B:1",
        special_tokens=[
            *({"id": "bos", "ids": before, "tokens": [tokenizer.bos_token]} for _ in before),
            *({"id": "eos", "ids": after, "tokens": [tokenizer.eos_token]} for _ in after),
        ],
    )


def _from_gguf(file: GGUFFile) -> Tokenizer | None:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        return None
    backend = byte_level_backend(file.metadata) or _transformers_backend(file.path.parent, gguf_file=file.path.name)
    tokenizer = Tokenizer(
        backend,
        bos_token=_token_at(tokens, file.metadata.get("tokenizer.ggml.bos_token_id")),
        eos_token=_token_at(tokens, file.metadata.get("tokenizer.ggml.eos_token_id")),
    )
    add_bos = file.metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is not None:
        add_eos = bool(file.metadata.get("tokenizer.ggml.add_eos_token"))
        _set_ends(tokenizer, add_bos=add_bos, add_eos=add_eos)
    return tokenizer


def _from_transformers(folder: Path) -> Tokenizer:
    slow = _transformers_tokenizer(folder)
    return Tokenizer(slow.backend_tokenizer, bos_token=slow.bos_token, eos_token=slow.eos_token)


def _transformers_backend(folder: Path, *, gguf_file: str) -> tokenizers.Tokenizer:
    backend: tokenizers.Tokenizer = _transformers_tokenizer(folder, gguf_file=gguf_file).backend_tokenizer
    return backend


def _transformers_tokenizer(folder: Path, **options: str) -> Any:
    from transformers import AutoTokenizer  # takes seconds to import, so only when nothing faster can read the file

    try:
        # The folder is local, and no code from it is run: `trust_remote_code` is off.
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)  # nosec B615
    except Exception as error:  # ImportError for sentencepiece, ValueError, KeyError and more, by file type
        raise UnsupportedModel(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if not hasattr(loaded, "backend_tokenizer"):
        raise UnsupportedModel(
            f"the tokenizer in {folder} ({type(loaded).__name__}) is written in Python; save it as a tokenizer.json"
        )
    return loaded


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a checkpoint file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenCheckpoint(f"{path} is not a JSON object")
    return value


def _content(token: str | Mapping[str, Any] | None) -> str | None:
    """Return a special token's text, which tokenizer_config.json stores as text or as an object."""
    return token["content"] if isinstance(token, Mapping) else token


def _token_at(tokens: Sequence[str], token_id: int | None) -> str | None:
    return tokens[token_id] if token_id is not None and token_id < len(tokens) else None
