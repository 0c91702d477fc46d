"""Log-probabilities in OpenAI's two formats (a list of entries for chat, four columns for completions) and in vLLM's for
prompts."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.contract.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from headgate.protocol.plan import Logprobs
from headgate.text.detokenizer import Detokenizer, token_bytes
from headgate.text.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have: the log-probability of a forbidden token


def chat_logprobs(tokenizer: Tokenizer | None, ids: Sequence[int], scores: Sequence[Logprobs]) -> ChatLogprobs:
    return ChatLogprobs([_entry(tokenizer, id, score) for id, score in zip(ids, scores, strict=True)])


def _entry(tokenizer: Tokenizer | None, id: int, score: Logprobs) -> TokenLogprob:
    spelled = _spelled(tokenizer, id)
    top = [_top(tokenizer, other, value) for other, value in zip(score.top_ids, score.top, strict=True)]
    return TokenLogprob(spelled.decode(errors="replace"), max(score.token, LOWEST), list(spelled), top)


def _top(tokenizer: Tokenizer | None, id: int, value: float) -> TopLogprob:
    spelled = _spelled(tokenizer, id)
    return TopLogprob(spelled.decode(errors="replace"), max(value, LOWEST), list(spelled))


def prompt_logprobs(tokenizer: Tokenizer | None, prompt: Sequence[int], scores: Sequence[Logprobs]) -> PromptLogprobs:
    """One entry per token of `prompt`, or up to the last one that was scored before the request was aborted."""
    return [None, *(_candidates(tokenizer, id, score) for id, score in zip(prompt[1:], scores, strict=False))]


def _candidates(tokenizer: Tokenizer | None, id: int, score: Logprobs) -> dict[str, PromptLogprob]:
    """The token itself comes first, because clients read the first entry."""
    likeliest = {
        other: (value, rank) for rank, (other, value) in enumerate(zip(score.top_ids, score.top, strict=True), 1)
    }
    return {
        str(other): PromptLogprob(max(value, LOWEST), rank, _decoded(tokenizer, other))
        for other, (value, rank) in ({id: (score.token, score.rank)} | likeliest).items()
    }


def _decoded(tokenizer: Tokenizer | None, id: int) -> str | None:
    return None if tokenizer is None else token_bytes(tokenizer, id).decode(errors="replace")


def completion_logprobs(
    tokenizer: Tokenizer | None, ids: Sequence[int], scores: Sequence[Logprobs | None], offsets: Sequence[int]
) -> CompletionLogprobs:
    """`scores` has None for the first token of a prompt, which has no probability."""
    return CompletionLogprobs(
        [_written(tokenizer, id) for id in ids],
        [None if score is None else max(score.token, LOWEST) for score in scores],
        [None if score is None else _likeliest(tokenizer, id, score) for id, score in zip(ids, scores, strict=True)],
        list(offsets[: len(ids)]),
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def _likeliest(tokenizer: Tokenizer | None, id: int, score: Logprobs) -> dict[str, float]:
    """The most likely tokens; the token itself is always included."""
    top = dict(zip(score.top_ids, score.top, strict=True)) | {id: score.token}
    return {_written(tokenizer, other): max(value, LOWEST) for other, value in top.items()}


def _written(tokenizer: Tokenizer | None, id: int) -> str:
    """A token as the completions API writes it; one that is not valid UTF-8 becomes `bytes:\\xe2\\x80`."""
    spelled = _spelled(tokenizer, id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _spelled(tokenizer: Tokenizer | None, id: int) -> bytes:
    return f"token_id:{id}".encode() if tokenizer is None else token_bytes(tokenizer, id)


def prompt_offsets(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[int]:
    """Where each token of a prompt begins in its text."""
    if tokenizer is None:
        return [0] * len(ids)
    detokenizer, offsets, chars = Detokenizer(tokenizer), [], 0
    for id in ids:
        offsets.append(chars)
        chars += len(detokenizer.push((id,)))
    return offsets
