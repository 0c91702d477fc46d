"""Without keys, a caller that knows an id may see and end that request, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headgate.contract.keys import Keys
from headgate.testing.tiny import tiny_model
from tests.api.clients import asking, begun, get, post, send, streaming
from tests.api.live import LiveServer, live_server

LONG = 15000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("strangers") / "tiny", max_position_embeddings=16384)


@pytest.fixture(scope="module")
def exposed(model: Path) -> Iterator[LiveServer]:
    with live_server(model, device="cpu", kv_blocks=1024, keys=Keys(admin="root", exposed=True)) as server:
        yield server


@pytest.fixture(scope="module")
def local(model: Path) -> Iterator[LiveServer]:
    with live_server(model, device="cpu", kv_blocks=1024) as server:
        yield server


def test_callers_without_a_key_see_and_end_only_requests_whose_ids_they_know(exposed: LiveServer):
    async def main() -> None:
        url = exposed.url
        bodies = [asking(LONG, request_id=id, tags={"run": "1"}) for id in ("one", "two")]
        async with streaming(url, bodies) as received:
            await begun(received)
            for path, body in (
                ("/v1/abort_requests", {"abort_all": True}),
                ("/v1/abort_requests", {"abort_all": True, "wait": False}),
                ("/v1/abort_requests", {"tags": {"run": "1"}}),
                ("/abort_request", {"abort_all": True}),
            ):
                refused = await post(url, path, body)
                assert refused.status == 403 and "by id" in refused.body["error"]["message"]
            assert (await get(url, "/v1/requests")).status == 403
            assert (await get(url, "/v1/requests/one")).body["status"] == "in_flight"
            assert (await send(url, "DELETE", "/v1/requests/one")).status == 200
            assert len((await get(url, "/v1/requests", key="root")).body["data"]) == 1
            assert (await post(url, "/v1/abort_requests", {"abort_all": True}, key="root")).status == 200
        assert [each.end for each in received] == [("abort", "api_abort")] * 2

    asyncio.run(main())


def test_a_web_page_of_another_site_has_no_admin_rights_and_our_own_has(local: LiveServer):
    with httpx.Client(base_url=local.url, timeout=60, trust_env=False) as client:
        evil, own = {"Origin": "https://evil.example"}, {"Origin": local.url}
        for path, body in (("/v1/pause", {}), ("/v1/abort_requests", {"abort_all": True})):
            assert client.post(path, json=body, headers=evil).status_code == 403
        assert client.get("/flush_cache", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
        assert client.get("/v1/requests", headers={"Host": "evil.example"}).status_code == 403
        for headers in ({}, own):
            assert client.get("/v1/requests", headers=headers).status_code == 200
            assert client.post("/v1/flush_cache", headers=headers).status_code == 200
            assert client.post("/v1/abort_requests", json={"abort_all": True}, headers=headers).status_code == 200
