"""TRL's `VLLMClient`, which the trainers of TRL use for generation and for scoring."""

from __future__ import annotations

import sys

from trl.generation.vllm_client import VLLMClient

from tests.frameworks.clients.checks import MODEL, Servers, ask, given, run_checks

PROMPTS = [[1, 2, 3], [4, 5]]


def the_server_describes_itself(client: VLLMClient, servers: Servers) -> None:
    assert client.model == MODEL and client.get_world_size() == 1
    assert client.get_server_info()["model_config"]["dtype"] == "torch.float32"


def generate_returns_ids_and_log_probabilities_of_every_choice(client: VLLMClient, servers: Servers) -> None:
    answer = client.generate(PROMPTS, n=2, temperature=0.0, max_tokens=8, generation_kwargs={"ignore_eos": True})
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    (direct,) = ask(f"{servers.url}/v1/completions", body)["choices"]
    assert answer["prompt_ids"] == PROMPTS
    assert len(answer["completion_ids"]) == 4 and answer["completion_ids"][0] == direct["token_ids"]
    assert [len(each) for each in answer["logprobs"]] == [8] * 4
    sampled = [[token for (token,) in each] for each in answer["logprob_token_ids"]]
    assert sampled == answer["completion_ids"]


def chat_returns_ids_and_log_probabilities(client: VLLMClient, servers: Servers) -> None:
    messages = [[{"role": "user", "content": text}] for text in ("red", "blue")]
    answer = client.chat(messages, max_tokens=8, generation_kwargs={"ignore_eos": True})
    assert [len(each) for each in answer["completion_ids"]] == [8, 8]
    assert len(answer["prompt_ids"]) == 2 and len(answer["logprobs"]) == 2


def scores_of_an_answer_equal_its_log_probabilities(client: VLLMClient, servers: Servers) -> None:
    answer = client.generate(PROMPTS[:1], temperature=0.0, max_tokens=8, generation_kwargs={"ignore_eos": True})
    sequence = PROMPTS[0] + answer["completion_ids"][0]
    scored = client.get_sequence_logprobs([sequence], [len(PROMPTS[0])], top_logprobs=5)
    pairs = zip(scored["actual_logprobs"][0], answer["logprobs"][0], strict=True)
    assert all(abs(score - logprob) < 1e-3 for (score,), (logprob,) in pairs)
    assert [top[0] for top in scored["logprob_token_ids"][0]] == answer["completion_ids"][0]


def the_prefix_cache_can_be_reset(client: VLLMClient, servers: Servers) -> None:
    client.reset_prefix_cache()


CHECKS = (
    the_server_describes_itself,
    generate_returns_ids_and_log_probabilities_of_every_choice,
    chat_returns_ids_and_log_probabilities,
    scores_of_an_answer_equal_its_log_probabilities,
    the_prefix_cache_can_be_reset,
)

if __name__ == "__main__":
    sys.exit(run_checks("trl", CHECKS, VLLMClient(given().url), given()))
