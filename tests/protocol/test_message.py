from __future__ import annotations

import msgspec
import pytest

from headgate.protocol.message import CLIENT_SHIFT, Abort, EngineInfo, Message, Submit, client_of
from headgate.protocol.output import Outputs
from headgate.protocol.request import GenerateRequest


def test_messages_are_tagged_by_type():
    for message in (Submit([GenerateRequest(1, (2,))]), Abort([1, 2], "api_abort")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message) == message


def test_an_id_contains_its_client():
    assert client_of(3 << CLIENT_SHIFT | 17) == 3


def test_outputs_need_one_id_per_token():
    with pytest.raises(ValueError, match="each token has one id"):
        Outputs(ids=[1], tokens=[2, 3])


def test_groups_of_layers_divide_the_blocks_among_them():
    info = EngineInfo(100, 50, (), 10, 32, 4, "cpu", "torch", "float32", groups=2)
    assert info.kv_tokens == 160
