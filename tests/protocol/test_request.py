from __future__ import annotations

import math
import random
from array import array
from hashlib import blake2b

import msgspec
import pytest

from headgate.protocol.keys import KEY_BYTES, RUN, next_keys, root_key, tenant_salt
from headgate.protocol.output import Outputs
from headgate.protocol.request import GenerateRequest, SamplingParams, Ticket


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens must be at least 1"),
        ("max_tokens", 2**31, "max_tokens must be at least 1, in 31 bits"),
        ("min_tokens", 2**31, "min_tokens must be between 0 and max_tokens"),
        ("stop_token_ids", (2**32,), "stop_token_ids must be token ids"),
        ("temperature", -0.1, "temperature must be between 0 and 100"),
        ("temperature", math.nan, "temperature must be between 0 and 100"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1"),
        ("top_k", -1, r"top_k must be 0 \(off\) or a positive number"),
        ("min_p", 1.5, "min_p must be between 0 and 1"),
        ("seed", 2**63, "seed must be a 64-bit integer"),
        ("repetition_penalty", 0.0, "repetition_penalty must be between 0.01 and 100"),
        ("presence_penalty", 3.0, "presence_penalty must be between -2 and 2"),
        ("frequency_penalty", -3.0, "frequency_penalty must be between -2 and 2"),
        ("logit_bias", {1: math.inf}, "logit_bias must be between -1e30 and 1e30"),
        ("logit_bias", {-1: 1.0}, "logit_bias must be keyed on token ids"),
        ("min_tokens", -1, "min_tokens must be between 0 and max_tokens"),
        ("stop_token_ids", (-1,), "stop_token_ids must be token ids"),
        ("logprobs", 21, "logprobs must be between 0 and 20"),
        ("prompt_logprobs", -1, "prompt_logprobs must be between 0 and 20"),
        ("grammar", "", "grammar must be between 1 and 262144 characters long"),
        ("grammar", "x" * (2**18 + 1), "grammar must be between 1 and 262144 characters long"),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(field, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(max_tokens=2, min_tokens=3)


@pytest.mark.parametrize("field", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_a_grammar_alone_says_when_an_answer_ends(field):
    with pytest.raises(ValueError, match="with a grammar"):
        SamplingParams(grammar="start: /a/", **field)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (-1,)}, "prompt token ids must be between"),
        ({"prompt": (2**32,)}, "prompt token ids must be between"),
        ({"prompt": (1,), "generated": (2**32,)}, "generated token ids must be between"),
        ({"prompt": (1,), "priority": 2**31}, "priority must be a 32-bit integer"),
        ({"prompt": (1,), "timeout_s": 0.0}, "timeout_s must be above 0"),
        ({"prompt": (1,), "timeout_s": math.nan}, "timeout_s must be above 0"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GenerateRequest(1, **fields)


def test_a_request_survives_the_wire():
    sampling = SamplingParams(temperature=0.5, stop_token_ids=(3,), logit_bias={7: -1.0}, grammar="start: /a/")
    request = GenerateRequest(2**40, (1, 2), sampling, generated=(5,), timeout_s=1.5, salt="a")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest) == request


def test_a_message_from_an_older_peer_lacks_only_the_newest_fields():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([1, [2, 3]]), type=GenerateRequest) == GenerateRequest(
        1, (2, 3)
    )


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_makes_the_past_matter(field):
    assert not SamplingParams().penalised
    assert SamplingParams(**{field: 1.5}).penalised


def test_keys_differ_in_version_adapter_salt_tokens_and_place():
    roots = [
        root_key(0),
        root_key(1),
        root_key(0, "a"),
        root_key(0, "", "a"),
        root_key(0, "ab"),
        root_key(0, "a", "b"),
    ]
    first = next_key(roots[0], [1, 2])
    keys = [next_key(root, [1, 2]) for root in roots] + [next_key(roots[0], [2, 1]), next_key(first, [1, 2])]
    assert len(set(roots + keys)) == len(roots + keys)
    assert all(len(key) == KEY_BYTES for key in keys)


def next_key(parent: bytes, tokens: list[int]) -> bytes:
    (key,) = next_keys(parent, tokens, len(tokens))
    return key


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_keys_of_many_blocks_are_those_of_one_after_another_also_when_they_are_remembered(block_size):
    rng = random.Random(block_size)
    shared = [rng.randrange(2**31) for _ in range(40 * block_size)]
    for parent in (root_key(0), root_key(1)):
        for blocks in (0, 1, RUN - 1, RUN, RUN + 1, 2 * RUN, 40):
            for first in (shared[:1], [7]):  # one block of the same, or of another beginning
                tokens = (first + shared[1:])[: blocks * block_size]
                expected, last = [], parent
                for i in range(blocks):
                    block = array("I", tokens[i * block_size : (i + 1) * block_size])
                    last = blake2b(last + block.tobytes(), digest_size=KEY_BYTES).digest()
                    expected.append(last)
                assert next_keys(parent, tokens, block_size) == expected


def test_66_no_two_pairs_of_tenant_and_salt_make_the_same_root():
    names = ("", "a", ":", "a:", ":a", "', '", "('a', 'b')", "a\\", "'")
    roots = {tenant_salt(tenant, salt) for tenant in names for salt in names}
    assert len(roots) == len(names) ** 2


def test_outputs_are_true_when_they_say_something():
    assert not Outputs()
    assert Outputs(ids=[1], tokens=[2])


def test_kv_is_fetched_or_computed_for_others_but_not_both():
    with pytest.raises(ValueError, match="exclude each other"):
        GenerateRequest(1, (1, 2), export_kv=True, ticket=Ticket("127.0.0.1:1", 1, 1, 16, 0, b""))
