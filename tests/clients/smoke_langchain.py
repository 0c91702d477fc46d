"""langchain-openai against a running server: `smoke_langchain.py URL`."""

from __future__ import annotations

import sys

from langchain_openai import ChatOpenAI


def main(url: str) -> None:
    chat = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="tenant-key", max_tokens=12, temperature=0, seed=1)
    whole = chat.invoke("Hello")
    assert whole.usage_metadata["output_tokens"] <= 12
    assert "".join(chunk.content for chunk in chat.stream("Hello")) == whole.content
    both = chat.batch(["Hello", "Hello"])
    assert [answer.content for answer in both] == [whole.content] * 2
    print("langchain: invoked, streamed and batched alike")


main(sys.argv[1])
