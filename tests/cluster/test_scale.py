"""Scaling through POST /v1/scale and `headgate scale`; fleet files; invalid flags."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import cli
from headgate.cli.up import FleetSpec, fleet_spec, recipe
from headgate.client import AsyncFleet, Fleet
from headgate.cluster.fleetfile import read_fleet_file
from headgate.config import RouteConfig
from headgate.errors import HeadgateError, RequestError
from headgate.router.control.scaling import load_of
from headgate.router.router import Router
from tests.api.serving import metric_values
from tests.router.fleets import LiveRouter, fake_worker, live_router


class FakeScaler:
    def __init__(self) -> None:
        self.wanted = {"mixed": 2, "prefill": 0, "decode": 0}
        self.running = dict(self.wanted)
        self.in_time = True
        self.refuses = ""

    async def scale(self, counts: Mapping[str, int], timeout_s: float) -> bool:
        if self.refuses:
            raise HeadgateError(self.refuses)
        self.wanted |= counts
        if self.in_time:
            self.running = dict(self.wanted)
        return self.in_time


@pytest.fixture
def router() -> Iterator[LiveRouter]:
    with live_router(admin_key="root") as router:
        router.router.scaler = FakeScaler()
        yield router


def scale(router: LiveRouter, *arguments: str) -> int:
    return cli.main(["scale", *arguments, "--url", router.url], {"HEADGATE_ADMIN_KEY": "root"})


def test_a_router_without_servers_of_its_own_refuses_to_scale(router: LiveRouter):
    router.router.scaler = None
    for answer in (router.get("/v1/scale", key="root"), router.post("/v1/scale", {"mixed": 2}, key="root")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "no_fleet")
        assert "headgate up" in answer.json()["error"]["message"]


def test_59_scaling_answers_200_when_done_202_when_not_done_in_time_and_502_on_failure(router: LiveRouter):
    done = router.post("/v1/scale", {"mixed": 3}, key="root")
    assert (done.status_code, done.json()["status"]) == (200, "success")
    assert done.json()["result"]["ready"] == {"mixed": 3, "prefill": 0, "decode": 0}
    router.router.scaler.in_time = False
    early = router.post("/v1/scale", {"decode": 1}, key="root")
    assert (early.status_code, early.json()["status"]) == (202, "accepted")
    assert early.json()["result"] == {
        "wanted": {"mixed": 3, "prefill": 0, "decode": 1},
        "ready": {"mixed": 3, "prefill": 0, "decode": 0},
    }
    router.router.scaler.refuses = "no memory"
    failed = router.post("/v1/scale", {"mixed": 9}, key="root")
    assert (failed.status_code, failed.json()["error"]["code"]) == (502, "scale_failed")
    assert "no memory" in failed.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "mixed"),
        ({"boss": 1}, "boss"),
        ({"mixed": -1}, "mixed"),
        ({"mixed": "2"}, "mixed"),
        ({"timeout": 3}, "mixed"),
    ],
)
def test_an_invalid_scale_body_is_refused(router: LiveRouter, body: dict[str, Any], param: str):
    refused = router.post("/v1/scale", body, key="root")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert router.router.scaler.wanted["mixed"] == 2


def test_28_wanted_and_ready_servers_are_in_the_metrics(router: LiveRouter):
    router.router.scaler.in_time = False
    router.post("/v1/scale", {"mixed": 3}, key="root")
    values = metric_values(router.get("/metrics").text)
    assert values['headgate:router_servers_wanted{role="mixed"}'] == 3
    assert values['headgate:router_servers_ready{role="mixed"}'] == 2
    documented = (Path(__file__).parents[2] / "docs/router.md").read_text()
    assert "`servers_wanted" in documented and "`servers_ready" in documented
    router.router.scaler = None
    assert "servers_wanted" not in router.get("/metrics").text


def test_scaling_requires_the_admin_key(router: LiveRouter):
    assert router.post("/v1/scale", {"mixed": 1}).status_code == 403 == router.get("/v1/scale").status_code


def test_the_command_and_both_clients_scale(router: LiveRouter, capsys: pytest.CaptureFixture[str]):
    assert scale(router, "mixed=4", "decode=1") == 0
    assert capsys.readouterr().out == "mixed    4 ready of 4\ndecode   1 ready of 1\n"
    assert scale(router) == 0 and "mixed    4 ready of 4" in capsys.readouterr().out
    assert Fleet(router.url, "root").scale({"mixed": 5}).ready["mixed"] == 5
    assert asyncio.run(AsyncFleet(router.url, "root").scale({"mixed": 6})).done
    assert asyncio.run(AsyncFleet(router.url, "root").size()).wanted["mixed"] == 6
    router.router.scaler.in_time = False
    assert scale(router, "mixed=7") == cli.FAILED and "6 ready of 7" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["mixed", "mixed=", "mixed=-1", "boss=2", "mixed=1.5", "=3"])
def test_an_invalid_count_is_refused_in_one_sentence(text: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["scale", text], {}) == cli.WRONG_USE
    assert "ROLE=N" in capsys.readouterr().err
    assert cli.main(["scale", "mixed=1", "mixed=2"], {}) == cli.WRONG_USE
    assert "twice" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------- load


def test_waiting_requests_are_distinguished_from_running_ones():
    async def test() -> None:
        router = Router(RouteConfig())
        worker = router.fleet.add("http://127.0.0.1:1")
        router.fleet.set_state(worker, "ready")
        worker.total_blocks, worker.free_blocks, worker.max_running, worker.running = 100, 25, 8, 2
        began_s = router.loop.time() - 7
        waiting = SimpleNamespace(
            began_s=began_s,
            moves=0,
            unresumable=False,
            journal=SimpleNamespace(tokens=0),
            worker=worker,
            prefill_request=None,
            hold=lambda _: None,
        )
        router.live["", "a", 0] = waiting  # type: ignore[assignment]
        load = load_of(router, "mixed")
        # A long prompt is being computed; nothing waits.
        assert (load.queue_s, load.kv_usage, load.busy) == (
            0,
            0.75,
            0.25,
        )
        worker.waiting = 1
        assert load_of(router, "mixed").queue_s >= 7 and load_of(router, "prefill").queue_s == 0
        waiting.journal.tokens = 1
        assert load_of(router, "mixed").queue_s == 0
        waiting.journal.tokens, waiting.worker = 0, None  # not placed yet
        assert load_of(router, "mixed").queue_s >= 7 and load_of(router, "prefill").queue_s == 0
        router.hold(queue=True)
        assert load_of(router, "mixed") is None
        router.live.clear()
        await router.close()

    asyncio.run(test())


def test_a_fleet_without_workers_has_no_load():
    async def test() -> None:
        router = Router(RouteConfig())
        assert load_of(router, "mixed") == (0, 0, 0)
        await router.close()

    asyncio.run(test())


def test_the_load_is_computed_from_what_workers_report():
    with fake_worker() as fake, live_router(fake.url) as router:
        load = router.do(lambda: load_of(router.router, "mixed"))
        assert load.queue_s == 0 and 0 <= load.kv_usage <= 1 and 0 <= load.busy <= 1


# ---------------------------------------------------------------------------------------------------------- files and flags

FILE = """
model = "/models/tiny"
serve = ["--dtype", "float32"]

[mixed]
autoscale = "2:6"
cpus = 4
serve = ["--max-context", "512"]

[decode]
count = 3
"""


def written(tmp_path: Path, text: str, name: str = "fleet.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_fleet_file_is_toml_or_json_with_the_same_names(tmp_path: Path):
    file = read_fleet_file(written(tmp_path, FILE))
    assert (file.model, file.groups["mixed"].number, file.groups["decode"].number) == ("/models/tiny", 2, 3)
    mixed = '{"autoscale": "2:6", "cpus": 4, "serve": ["--max-context", "512"]}'
    common = '"model": "/models/tiny", "serve": ["--dtype", "float32"]'
    same = f'{{{common}, "decode": {{"count": 3}}, "mixed": {mixed}}}'
    assert read_fleet_file(written(tmp_path, same, "fleet.json")) == file


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("[mixed]\ncuont = 2", "cuont"),
        ("[mixed]\ncount = -1", "count"),
        ("[mixed]\ncpus = 0", "cpus"),
        ('[mixed]\nautoscale = "6:2"', "mixed: autoscale must be LEAST:MOST"),
        ('[mixed]\ncount = 9\nautoscale = "1:6"', "count 9 is outside autoscale 1:6"),
        ("[mixed", "fleet.toml"),
    ],
)
def test_an_invalid_fleet_file_is_refused_with_the_field_name(tmp_path: Path, text: str, about: str):
    with pytest.raises(RequestError, match=about):
        read_fleet_file(written(tmp_path, text))


def test_the_documented_fleet_files_are_valid(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs/ray.md").read_text()
    shown = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    specs = [parsed_spec("--ray", "auto", "--fleet", written(tmp_path, text)) for text in shown]
    assert specs[0].counts == {"mixed": 2} and specs[0].bounds["mixed"].most == 6 and specs[0].model == "/models/qwen"
    assert specs[1].counts == {"prefill": 1, "decode": 3} and specs[1].groups["decode"].gpus == 1


def parsed_spec(*flags: object) -> FleetSpec:
    return fleet_spec(cli.parser().parse_args(["up", *map(str, flags)]))


def test_command_line_flags_apply_to_every_role():
    spec = parsed_spec("--ray", "auto", "--cpus", 4, "--autoscale", "decode=2:3", "--prefill", 1)
    assert spec.counts == {"prefill": 1, "decode": 2} and spec.most == 4
    assert {group.cpus for group in spec.groups.values()} == {4}
    assert parsed_spec().counts == {"mixed": 2} and parsed_spec("--mixed", 1).counts == {"mixed": 1}


@pytest.mark.parametrize("flags", [("--mixed", 0), ("--mixed", 0, "--decode", 0), ("--decode", 0)])
def test_a_fleet_without_decode_servers_is_refused_instead_of_using_the_default(flags: tuple[object, ...]):
    with pytest.raises(RequestError, match="at least one mixed or decode server"):
        parsed_spec(*flags)


def test_fewer_gpus_than_ranks_are_refused_before_any_server_starts(tmp_path: Path):
    text = '[mixed]\ngpus = {}\nserve = ["--tensor-parallel", "2"]'
    with pytest.raises(RequestError, match="mixed: 2 ranks need a GPU each, but gpus is 1; set gpus = 2"):
        parsed_spec("--ray", "auto", "--fleet", written(tmp_path, text.format(1)))
    for enough in (2, 0):  # 0: on CPUs
        assert parsed_spec("--ray", "auto", "--fleet", written(tmp_path, text.format(enough))).counts == {"mixed": 1}


def test_engines_of_several_ranks_do_not_exchange_kv(tmp_path: Path):
    for flags, single_rank in (('["--tensor-parallel", "2"]', False), ('["--kv-blocks", "64"]', True)):
        file = written(tmp_path, f"[mixed]\nserve = {flags}")
        options = cli.parser().parse_args(["up", "--fleet", str(file)])
        made = recipe(options, fleet_spec(options), "mixed", "/m", "m", {})
        assert made.exchanges_kv is single_rank and made.arguments[-2:] == tuple(json.loads(flags))


def test_a_missing_fleet_file_is_reported_in_one_sentence(tmp_path: Path):
    with pytest.raises(RequestError, match="cannot be read"):
        read_fleet_file(tmp_path / "none.toml")


def error_of(capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    assert cli.main(["up", *map(str, flags), "--port", "0"], {}) in (cli.WRONG_USE, cli.FAILED)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("headgate: ")]
    return line


@pytest.mark.parametrize(
    ("flags", "about"),
    [
        (("--cpus", 2), "add --ray"),
        (("--ray", "a:1", "--cpus", 0), "--cpus must be above 0"),
        (("--ray", "a:1", "--gpus", -1), "--gpus"),
        (("--ray", "a:1", "--room-timeout", 0), "--room-timeout"),
        (("--autoscale", "mixed"), "ROLE=LEAST:MOST"),
        (("--autoscale", "mixed=3:1"), "1 <= LEAST <= MOST"),
        (("--autoscale", "mixed=2:4", "--mixed", 5), "--mixed 5 is not within"),
        (("--autoscale", "prefill=1:2"), "requires at least one --decode"),
    ],
)
def test_invalid_flags_are_refused_in_one_sentence(flags: tuple, about: str, capsys: pytest.CaptureFixture[str]):
    assert about in error_of(capsys, *flags)


@pytest.mark.parametrize(
    ("text", "flags", "about"),
    [
        ("[mixed]\ncount = 2", ("--mixed", 3), "leave out --mixed"),
        ("[mixed]\ngpus = 1", (), "add --ray"),
        ("[prefill]\ncount = 1", (), "requires at least one --decode"),
        ("", (), "at least one mixed or decode server"),
        ('[mixed]\nserve = ["--port", "1"]', (), "--port of a server is set by headgate up"),
    ],
)
def test_a_fleet_file_that_conflicts_with_flags_is_refused_in_one_sentence(
    tmp_path: Path, text: str, flags: tuple, about: str, capsys: pytest.CaptureFixture[str]
):
    assert about in error_of(capsys, "--fleet", written(tmp_path, text), *flags)


def test_a_missing_ray_package_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'headgate[ray]'" in error_of(capsys, "--ray", "127.0.0.1:6379")
