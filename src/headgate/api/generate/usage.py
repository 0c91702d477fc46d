"""Token usage in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headgate.api.generate.generation import Finish
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


def version_spans(versions: Iterable[int]) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    for version in versions:
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].tokens + 1)
        else:
            spans.append(VersionSpan(version, 1))
    return spans
