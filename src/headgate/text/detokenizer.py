"""Incremental detokenizer: the concatenated deltas of a stream are exactly `decode` of all its ids.

A character is emitted when no later token can change it. An incomplete UTF-8 sequence is held back, and becomes a
replacement character only once it is known to be invalid or the stream ends. The work per token does not grow with
the length of the stream. To resume a stream, its ids are decoded again and the text that the client has already
received is skipped, so the text continues exactly.

`tokenizers.decoders.DecodeStream` was tried and rejected: it cannot flush the tail of a stream, and it raises an
exception when byte-fallback tokens that looked like a character turn out, with the next byte, not to be one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from headgate.errors import RequestError
from headgate.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes the ids of one stream to text.

    With `prompt_ids`, the text is what the ids add to the prompt: a first word keeps the space before it. To resume,
    pass the `generated` ids so far and how many characters of their text the client has received; the missing text is
    returned by the next `push`, even `push(())`. Stop strings need nothing more to resume: see `headgate.text.stops`.

    `skip_special` omits special tokens, except those in `kept`.

    Call `finish` only at the real end of the answer, not before a resume elsewhere: it replaces an unfinished
    character, which the resumed stream may still complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        generated: Sequence[int] = (),
        delivered_chars: int = 0,
        skip_special: bool = True,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        skipped = tokenizer.special_ids - kept if skip_special else frozenset()
        self._decoding = _decoding_of(tokenizer, skipped)(prompt_ids)
        self._backlog = self._decoding.feed(generated)
        if delivered_chars > len(self._backlog):
            raise RequestError(
                f"the request says that {delivered_chars} characters were delivered, "
                f"but its {len(generated)} generated ids make only {len(self._backlog)}"
            )
        self._backlog = self._backlog[delivered_chars:]

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete; "" if they end in the middle of a character."""
        if self._backlog:
            return self._take_backlog() + self._decoding.feed(ids)
        return self._decoding.feed(ids)

    def finish(self) -> str:
        """Return the rest of the text, with replacement characters for incomplete sequences."""
        return self._take_backlog() + self._decoding.flush()

    def _take_backlog(self) -> str:
        backlog, self._backlog = self._backlog, ""
        return backlog


class Decoding(Protocol):
    """The decoding state of one stream. The three implementations are below."""

    def feed(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


DecodingFactory = Callable[[Sequence[int]], Decoding]  # takes the prompt's ids


@lru_cache(maxsize=8)  # token tables are shared by all streams of a tokenizer
def _decoding_of(tokenizer: Tokenizer, skipped: frozenset[int]) -> DecodingFactory:
    steps = _decoder_steps(tokenizer)
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            table = _ByteLevelTable(tokenizer, skipped)
            return lambda _: _ByteLevelDecoding(table)
        case ["Replace", "ByteFallback", "Fuse"] if _replaces_text(steps[0]):
            pieces = _PieceTable(tokenizer, skipped, steps[0])
            return lambda _: _PieceDecoding(pieces)
        case ["Replace", "ByteFallback", "Fuse", "Strip"] if _replaces_text(steps[0]) and not steps[3]["stop"]:
            pieces = _PieceTable(tokenizer, skipped, steps[0])
            margin = steps[3]["content"] * steps[3]["start"]
            return lambda prompt: _PieceDecoding(pieces, margin="" if prompt else margin)
    return lambda prompt: _WindowDecoding(tokenizer, skipped, prompt)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _replaces_text(step: dict[str, Any]) -> bool:
    return "String" in step["pattern"]  # otherwise it is a regular expression


# ----------------------------------------------------------------------------------------------------- byte-level BPE


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's encoding of bytes: printable ones represent themselves, the others are characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


class _ByteLevelTable(dict[int, bytes]):
    """The bytes of each token, computed on first use. A skipped or unknown token has none."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        super().__init__()
        self._token = _token_lookup(tokenizer, skipped)

    def __missing__(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""  # not cached, so that requests with nonexistent ids cannot fill the memory
        try:
            spelled = bytes(map(_BYTE_ALPHABET.__getitem__, token))
        except KeyError:  # an added token, stored as plain text
            spelled = token.encode()
        self[token_id] = spelled
        return spelled


class _ByteLevelDecoding:
    def __init__(self, table: _ByteLevelTable) -> None:
        self._bytes_of = table.__getitem__
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


# ----------------------------------------------------------------------------------- sentencepiece with byte fallback


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _PieceTable(dict[int, str | bytes | None]):
    """The meaning of each token: text, one byte, or None if it is skipped or unknown."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], replace: dict[str, Any]) -> None:
        super().__init__()
        self._token = _token_lookup(tokenizer, skipped)
        self._space, self._replacement = replace["pattern"]["String"], replace["content"]

    def __missing__(self, token_id: int) -> str | bytes | None:
        token = self._token(token_id)
        if token is None:
            return None  # not cached, so that requests with nonexistent ids cannot fill the memory
        byte = _BYTE_TOKEN.fullmatch(token)
        piece = bytes.fromhex(byte[1]) if byte else token.replace(self._space, self._replacement)
        self[token_id] = piece
        return piece


class _PieceDecoding:
    """Decodes tokens that are pieces of text or single bytes.

    Consecutive byte tokens are one unit: if they are not UTF-8 as a whole, *each* becomes a replacement character.
    Text is therefore held back from the first byte token until the next text token: a newline or an emoji arrives one
    token late, and a word in a script that the vocabulary lacks arrives as a whole.
    """

    def __init__(self, table: _PieceTable, margin: str = "") -> None:
        self._piece_of = table.__getitem__
        self._run = bytearray()
        self._margin = margin  # the prefix that may still have to be removed from the start of the text

    def feed(self, ids: Iterable[int]) -> str:
        text = []
        for piece in map(self._piece_of, ids):
            if isinstance(piece, bytes):
                self._run += piece
            elif piece is not None:
                if self._run:
                    text.append(self._end_run())
                text.append(piece)
        return self._strip("".join(text))

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._margin and text:
            if not text.startswith(self._margin[0]):
                self._margin = ""
                break
            text, self._margin = text[1:], self._margin[1:]
        return text


# -------------------------------------------------------------------------------------------------- any other decoder


class _WindowDecoding:
    """Decodes new ids together with a few earlier ones, and returns the text that the new ids add.

    Exact for decoders in which a token's text depends only on adjacent tokens or on being the first token: WordPiece,
    Metaspace, word suffixes. An unfinished character is held back, but for at most MOST_PENDING tokens.
    """

    CONTEXT = 6
    MOST_PENDING = 16

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], prompt: Sequence[int]) -> None:
        self._decode = tokenizer.backend.decode
        self._skipped = skipped
        self._pending: list[int] = []
        self._set_context(self._kept(prompt[-4 * self.CONTEXT :]))

    def feed(self, ids: Iterable[int]) -> str:
        self._pending += self._kept(ids)
        added = self._added()
        if added.endswith(REPLACEMENT) and len(self._pending) < self.MOST_PENDING:
            return ""
        self._set_context(self._context + self._pending)
        self._pending = []
        return added

    def flush(self) -> str:
        added, self._pending = self._added(), []
        return added

    def _kept(self, ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in ids if token_id not in self._skipped]

    def _added(self) -> str:
        if not self._pending:
            return ""
        return self._decode(self._context + self._pending, skip_special_tokens=False)[self._context_chars :]

    def _set_context(self, ids: list[int]) -> None:
        self._context = ids[-self.CONTEXT :]
        self._context_chars = len(self._decode(self._context, skip_special_tokens=False))


def _token_lookup(tokenizer: Tokenizer, skipped: frozenset[int]) -> Callable[[int], str | None]:
    """Return a function that finds a token by its id; it returns None for tokens that decoding skips."""
    find = tokenizer.backend.id_to_token
    return lambda token_id: None if token_id in skipped else find(token_id)


# ------------------------------------------------------------------------------------------------------ single tokens


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of one token, special or not. They may be only a part of a character."""
    return _spelling_of(tokenizer)(token_id)


@lru_cache(maxsize=8)
def _spelling_of(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    steps = _decoder_steps(tokenizer)
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return _ByteLevelTable(tokenizer, frozenset()).__getitem__
        case ["Replace", "ByteFallback", "Fuse", *_] if _replaces_text(steps[0]):
            pieces = _PieceTable(tokenizer, frozenset(), steps[0])
            return lambda token_id: _piece_bytes(pieces[token_id])
    return lambda token_id: tokenizer.decode([token_id], skip_special=False).encode()


def _piece_bytes(piece: str | bytes | None) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece or b""
