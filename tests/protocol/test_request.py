from __future__ import annotations

import math
import random
from array import array
from hashlib import blake2b

import msgspec
import pytest

from headgate.contract.sampling import SamplingParams
from headgate.protocol.keys import KEY_BYTES, RUN, next_keys, root_key, tenant_salt
from headgate.protocol.output import Outputs
from headgate.protocol.request import GenerateRequest, Ticket


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
def test_an_invalid_request_is_refused(fields, message):
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


def test_keys_depend_on_version_adapter_salt_tokens_and_position():
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
            for first in (shared[:1], [7]):  # the same first block, or another one
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


def test_outputs_are_truthy_when_not_empty():
    assert not Outputs()
    assert Outputs(ids=[1], tokens=[2])


def test_kv_is_fetched_or_computed_for_others_but_not_both():
    with pytest.raises(ValueError, match="exclude each other"):
        GenerateRequest(1, (1, 2), export_kv=True, ticket=Ticket("127.0.0.1:1", 1, 1, 16, 0, b""))
