"""litellm against a running server: `smoke_litellm.py URL`."""

from __future__ import annotations

import sys

import litellm


def main(url: str) -> None:
    ask = {
        "model": "openai/tiny",
        "api_base": f"{url}/v1",
        "api_key": "tenant-key",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = litellm.completion(**ask)
    text = whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 12 and whole.choices[0].finish_reason in ("stop", "length")
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True))
    assert streamed == text, (streamed, text)
    refused = ""
    try:
        litellm.completion(**(ask | {"max_tokens": 10**6}))
    except litellm.BadRequestError as error:
        refused = str(error)
    assert "their sum may be at most" in refused, "a request that cannot fit was not refused"
    print("litellm: whole, streamed and refused as they should be")


main(sys.argv[1])
