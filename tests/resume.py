"""Resuming an answer that another engine started."""

from __future__ import annotations

from headgate import LLM, SamplingParams


def resume(llm: LLM, prompt: list[int], params: SamplingParams, generated: list[int]) -> list[int]:
    """Return the rest of an answer that another engine has started."""
    (answer,) = llm.generate([prompt], params, generated=[generated], progress=False)
    assert answer.token_ids[: len(generated)] == generated
    return answer.token_ids[len(generated) :]
