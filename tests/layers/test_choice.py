"""The choice of the backend, and the log line when it is not the configured one."""

from __future__ import annotations

import logging

import pytest
import torch

from headgate.layers import choice
from headgate.layers.backend import Heads
from headgate.layers.choice import available_backends, choose_backend
from headgate.layers.cpu import NotCompiled

CPU = torch.device("cpu")
HEADS = Heads(query=4, kv=2, size=16)


def test_the_reference_backend_is_always_available():
    assert available_backends()[0] == "torch"
    assert choose_backend("torch", CPU, torch.float16, HEADS).name == "torch"


def test_deterministic_mode_changes_the_torch_backend_and_not_the_cpu_backend():
    for name in available_backends():
        chosen = choose_backend(name, CPU, torch.bfloat16, HEADS, deterministic=True)
        assert chosen.name.startswith({"torch": "torch, deterministic", "cpu": "cpu, "}[name])


@pytest.mark.parametrize(("name", "level"), [("auto", logging.INFO), ("cpu", logging.WARNING)])
@pytest.mark.parametrize(
    ("device", "dtype", "size", "reason"),
    [
        ("cpu", torch.float16, 16, "the CPU kernels compute in bfloat16 and float32, not torch.float16"),
        ("cpu", torch.float32, 10, "the CPU kernels take head sizes that are multiples of 8 up to 256, not 10"),
        ("meta", torch.float32, 16, "the CPU kernels do not run on meta"),
    ],
)
def test_unsupported_models_fall_back_to_torch_with_a_reason(caplog, name, level, device, dtype, size, reason):
    heads = Heads(query=4, kv=2, size=size)
    with caplog.at_level(logging.INFO):
        assert choose_backend(name, torch.device(device), dtype, heads).name == "torch"
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (level, f"computing in plain torch: {reason}")
    ]


def test_a_machine_without_kernels_computes_in_torch(caplog, monkeypatch):
    monkeypatch.setattr(choice, "load_kernels", lambda: NotCompiled("no C++ compiler"))
    with caplog.at_level(logging.INFO):
        assert choose_backend("auto", CPU, torch.float32, HEADS).name == "torch"
    assert "computing in plain torch: no C++ compiler" in caplog.text
    assert available_backends() == ["torch"]


def test_kernels_that_the_operator_can_repair_are_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(choice, "load_kernels", lambda: NotCompiled("no C++ compiler", "install g++"))
    assert choose_backend("auto", CPU, torch.float32, HEADS).name == "torch"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.message == (
        "answers will be slow, because torch computes them: no C++ compiler. To make them fast: install g++"
    )


def test_an_unknown_backend_name_is_refused():
    with pytest.raises(ValueError, match="backend 'cuda' is unknown; choose from auto, torch, cpu, triton"):
        choose_backend("cuda", CPU, torch.float32, HEADS)
