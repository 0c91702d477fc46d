"""Guarantee 54: pickles of other systems are read opcode by opcode, and nothing in them is imported, called or built."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
from contextlib import suppress
from typing import Any

import pytest

from headgate.device.weights.trainer_groups import id_in
from headgate.errors import BrokenCheckpoint
from headgate.pickled import Call, Name, NotPlain, decode_base64, read_pickle
from tests.updates.vllm_trainer import pickled_id

PLAIN: list[Any] = [
    *(None, True, False, 0, 255, 70_000, -5, 2**40, -(2**70), 1.5, "", "näme", "x" * 300, b"", b"\0\xff" * 300),
    *((), (1,), (1, 2), (1, 2, 3), tuple(range(9)), [], [1], [1, 2, [3]], {}, {"a": 1}, {"a": 1, 2: [b"c", ("d",)]}),
]
ran: list[str] = []


class Exploding:
    """Unpickling an instance runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ran.append, ("unpickled",)


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:20])
def test_plain_values_are_read_as_they_were(value: Any, protocol: int):
    assert read_pickle(pickle.dumps(value, protocol), ()) == value


def test_shared_values_are_shared():
    inner = [1]
    found = read_pickle(pickle.dumps((inner, inner, {"a": inner})), ())
    assert found == ([1], [1], {"a": [1]}) and found[0] is found[1] is found[2]["a"]


def test_54_a_value_that_contains_itself_is_read_without_recursion():
    loop: list[Any] = []
    loop.append(loop)
    found = read_pickle(pickle.dumps(loop), ())
    assert found[0] is found


def test_54_a_doubled_value_takes_memory_for_its_opcodes_only():
    value: Any = 1
    for _ in range(200):
        value = (value, value)  # 2**200 numbers if it were copied
    found = read_pickle(pickle.dumps(value), ())
    assert found[0] is found[1]


def test_54_a_call_is_described_and_not_made():
    data = pickle.dumps(Exploding())
    with pytest.raises(NotPlain, match=r"the pickle names builtins\.getattr, which is not allowed"):
        read_pickle(data, ())
    match read_pickle(pickle.dumps(os.getcwd), ("posix.getcwd",)):
        case Name(text="posix.getcwd"):
            pass
        case other:
            pytest.fail(f"{other!r}")
    made = read_pickle(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x05false\x85R.", ("os.system",))
    assert isinstance(made, Call) and made.function == "os.system" and made.arguments == ("false",)
    assert not ran


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "malformed|no end"),
        (b"\x80\x04", "malformed|no end"),
        (b"garbage", "the opcode GET"),
        (b"\x80\x04.", "a value is missing"),
        (b"\x80\x04NN.", "more than one value"),
        (b"\x80\x04t.", "a mark is missing"),
        (b"\x80\x04(.", "a value is missing"),
        (b"\x80\x04]}K\x01s.", "a value is missing|in the wrong place"),
        (b"\x80\x04}]K\x01s.", "a list is in the wrong place"),
        (b"\x80\x04}(K\x01u.", "a key has no value"),
        (b"\x80\x04h\x05.", "there is no entry 5"),
        (b"\x80\x04K\x01K\x02\x93.", "a int is in the wrong place"),
        (b"\x80\x04K\x01)R.", "a int is in the wrong place"),
        (b"\x80\x04]Nb.", "a list is in the wrong place"),
        (b"\x80\x02cos\nsystem\n.", "the opcode GLOBAL"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "names os.system, which is not allowed"),
        (b"\x80\x04\xf1.", "the opcode 0xf1"),
        (b"\x80\x04\x82\x01.", "the opcode EXT1"),
        (b"Pid\n.", "the opcode PERSID"),
        (b"\x80\x04NQ.", "the opcode BINPERSID"),
        (b"\x80\x05\x96\x01\x00\x00\x00\x00\x00\x00\x00a.", "the opcode BYTEARRAY8"),
        (b"\x80\x05\x97.", "the opcode NEXT_BUFFER"),
        (b"(ios\nsystem\n.", "the opcode INST"),
        (b"I" + b"9" * 9000 + b"\n.", "the opcode INT"),
        (b"\x8d" + b"\xff" * 8 + b".", "malformed"),
        (b"\x80\x04" + b"N" * 100, "at most 50"),
    ],
)
def test_54_everything_else_is_refused_by_its_name(data: bytes, why: str):
    with pytest.raises(NotPlain, match=why):
        read_pickle(data, (), longest=9500 if len(data) != 102 else 50)


def test_text_that_is_not_base64_is_refused():
    assert decode_base64("AAE=") == b"\0\1"
    for text in ("A", "ä", "AA E=", "_-8="):
        with pytest.raises(NotPlain, match="not base64"):
            decode_base64(text)


def test_54_an_nccl_id_is_read_from_vllms_pickle():
    unique_id = os.urandom(128)
    assert id_in(pickled_id(unique_id)) == unique_id


class WrongSize(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 64)]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"id": b"1"}, "another value"),
        (b"\0" * 128, "another value"),
        (WrongSize(), "names tests.test_pickled.WrongSize, which is not allowed"),
        (Exploding(), "names builtins.getattr, which is not allowed"),
        ("x" * 5000, "at most 4096 are read"),
    ],
    ids=["dict", "bytes", "structure", "code", "long"],
)
def test_54_another_pickle_in_the_place_of_an_nccl_id_is_refused(value: Any, why: str):
    with pytest.raises(BrokenCheckpoint, match=why):
        id_in(pickle.dumps(value))
    assert not ran


@pytest.mark.parametrize("seed", range(20))
def test_54_the_reader_survives_any_bytes(seed: int):
    """Damaged and random pickles give a value or NotPlain, and run nothing."""
    chance = random.Random(seed)
    sound = [pickled_id(os.urandom(128)), pickle.dumps(PLAIN), pickle.dumps(Exploding()), pickle.dumps(PLAIN, 2)]
    names = ("_ctypes._unpickle", "builtins.getattr")
    for _ in range(300):
        data = bytearray(chance.choice(sound))
        for _ in range(chance.randrange(1, 8)):
            match chance.randrange(3):
                case 0:
                    data[chance.randrange(len(data))] = chance.randrange(256)
                case 1:
                    at = chance.randrange(len(data))
                    del data[at : at + chance.randrange(9)]
                case _:
                    data.insert(chance.randrange(len(data)), chance.randrange(256))
            data = data or bytearray(b".")
        with suppress(NotPlain):
            read_pickle(bytes(data), names)
    for _ in range(300):
        with suppress(NotPlain):
            read_pickle(b"\x80\x04" + chance.randbytes(chance.randrange(60)) + b"\xff", ())
    assert not ran
