"""Token usage in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from msgspec import UNSET

from headgate.api.generate.generation import ChoiceJob, Finish, Piece
from headgate.api.weight_labels import WeightLabels
from headgate.contract.answers import PromptDetails, Usage, VersionSpan


def usage_of(finishes: Sequence[Finish], n: int) -> Usage:
    """The usage of a request with `n` choices per prompt.

    A prompt counts once, and a token of it counts as cached only if no choice computed it.
    """
    prompts = [finishes[i : i + n] for i in range(0, len(finishes), n)]
    prompt_tokens = sum(choices[0].prompt_tokens for choices in prompts)
    cached_tokens = sum(min(choice.cached_tokens for choice in choices) for choices in prompts)
    completion_tokens = sum(finish.output_tokens for finish in finishes)
    total_tokens = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total_tokens, PromptDetails(cached_tokens))


def usage_so_far(job: ChoiceJob, piece: Piece, output_tokens: int) -> Usage:
    """The usage of one choice up to `piece`; the number of cached tokens is known at its end."""
    prompt_tokens = len(job.request.prompt)
    cached = PromptDetails(piece.finish.cached_tokens if piece.finish else 0)
    return Usage(prompt_tokens, output_tokens, prompt_tokens + output_tokens, cached)


def version_spans(versions: Sequence[int], labels: WeightLabels) -> list[VersionSpan]:
    runs = ((version, len(list(run))) for version, run in groupby(versions))
    return [VersionSpan(version, tokens, labels.given(version) or UNSET) for version, tokens in runs]
