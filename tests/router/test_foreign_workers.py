"""Foreign servers as workers: recognised, probed, used, and never treated as Headgate workers."""

from __future__ import annotations

import json

import pytest

from tests.router.client import Wire, ask, routing, until
from tests.router.foreign import CHAT, MODEL, Foreign
from tests.router.mock import Fault, Mock
from tests.router.run import run

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
ROOT = {"authorization": "Bearer root"}
KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])


@KINDS
def test_a_foreign_worker_is_identified_and_its_answers_pass_unchanged(kind: str):
    async def main() -> None:
        async with Foreign(kind) as foreign, routing(foreign) as (router, url):  # type: ignore[arg-type]
            (worker,) = router.fleet
            await until(lambda: worker.state == "ready")
            assert (worker.kind, worker.models) == (kind, {MODEL})
            whole = await ask(url, CHAT, BODY)
            assert whole.json["id"] == "theirs-1" and whole.header("x-headgate-worker") == foreign.url
            streamed = await ask(url, CHAT, BODY | {"stream": True, "stream_options": {"include_usage": True}})
            direct = await ask(foreign.url, CHAT, BODY | {"stream": True, "stream_options": {"include_usage": True}})
            assert streamed.body.count(b"data: ") == direct.body.count(b"data: ") == 6
            assert json.loads(streamed.body.split(b"\n\n")[4][6:])["usage"]["completion_tokens"] == 4

    run(main())


@KINDS
def test_12_a_foreign_worker_is_disconnected_when_the_client_leaves(kind: str):
    async def main() -> None:
        async with Foreign(kind, pace_s=0.02) as foreign, routing(foreign) as (_, url):  # type: ignore[arg-type]
            wire = await Wire.open(url)
            wire.post(CHAT, BODY | {"stream": True, "max_tokens": 10_000})
            await wire.some(1)
            wire.close()
            await until(lambda: foreign.left == 1)

    run(main())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_44_an_unhealthy_foreign_worker_gets_no_requests_until_it_recovers(kind: str):
    async def main() -> None:
        async with Foreign(kind) as foreign, Mock() as ours, routing(foreign, ours) as (router, url):  # type: ignore[arg-type]
            await until(lambda: all(worker.state == "ready" for worker in router.fleet))
            foreign.sick = True
            worker = router.fleet.find(foreign.url)
            await until(lambda: worker.state == "down")
            for _ in range(4):
                assert (await ask(url, CHAT, BODY)).header("x-headgate-worker") == ours.url
            foreign.sick = False
            await until(lambda: worker.state == "ready")

    run(main())


@KINDS
def test_36_an_answer_begun_by_headgate_is_not_resumed_at_a_foreign_worker(kind: str):
    """The headgate worker fails in mid-answer and comes back. The idle foreign worker cannot resume the answer."""

    async def main() -> None:
        broken: list[str] = []

        def once(asked: object) -> Fault:
            broken.append("x")
            return Fault("cut", at=2) if len(broken) == 1 else Fault()

        async with (
            Mock(once) as ours,
            Foreign(kind) as foreign,
            routing(ours, foreign, policy="round_robin") as (router, url),  # type: ignore[arg-type]
        ):
            await until(lambda: all(worker.state == "ready" for worker in router.fleet))
            body = BODY | {"stream": True, "max_tokens": 40}
            answers = [await ask(url, CHAT, body) for _ in range(2)]
            assert all(answer.body.endswith(b"data: [DONE]\n\n") for answer in answers)
            assert len(ours.asked) == 2 and "resume" in ours.asked[1].body
            assert len(foreign.asked) == 1 and "resume" not in foreign.asked[0][2]

    run(main())


@pytest.mark.parametrize(
    ("kind", "hold", "go_on", "forget"),
    [
        ("vllm", "/pause", "/resume", "/reset_prefix_cache"),
        ("sglang", "/pause_generation", "/continue_generation", "/flush_cache"),
    ],
)
def test_a_foreign_worker_takes_part_in_control_calls_of_its_own_api(kind: str, hold: str, go_on: str, forget: str):
    async def main() -> None:
        async with Foreign(kind) as foreign, routing(foreign, admin_key="root") as (router, url):  # type: ignore[arg-type]
            (worker,) = router.fleet
            await until(lambda: worker.state == "ready")
            for path in (hold, go_on, forget):
                assert (await ask(url, path, {}, ROOT)).status == 200
                assert router.holding == (path == hold)
            assert foreign.paths() == [hold, go_on, forget]
            assert worker.horizon_s > float("-inf"), "its cached prefixes are forgotten"
            refused = await ask(url, "/v1/pause", {}, ROOT)
            assert refused.status == 404 and foreign.url in refused.error["message"]
            await ask(url, "/v1/resume", {}, ROOT)

    run(main())


def test_an_abort_by_id_ends_a_foreign_workers_answer_and_informs_the_client():
    async def main() -> None:
        async with Foreign("sglang", pace_s=0.02) as foreign, routing(foreign) as (router, url):  # type: ignore[arg-type]
            await until(lambda: all(worker.state == "ready" for worker in router.fleet))
            wire = await Wire.open(url)
            wire.post(CHAT, BODY | {"stream": True, "max_tokens": 10_000, "request_id": "theirs"})
            await wire.some(200)
            told = await ask(url, "/v1/abort_requests", {"req_ids": ["theirs", "nobody"]})
            assert [each["request_id"] for each in told.json["result"]["aborted"]] == ["theirs"]
            assert told.json["result"]["not_found"] == ["nobody"]
            answer = await wire.response()
            assert answer.complete and b'"finish_reason":"abort"' in answer.body
            await until(lambda: foreign.left == 1)
            wire.close()

    run(main())
