"""Requests are aborted, paused, moved and resumed on a GPU as on a CPU: the same tests, with whole servers.

Engines are in float32 and deterministic, so "the same tokens" is literal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.contract.keys import Keys
from headgate.testing.tiny import tiny_model
from tests.api import test_abort, test_pause, test_weights
from tests.api.clients import asking, streaming
from tests.api.live import LiveServer, live_server
from tests.transfer import test_http

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "deterministic": True}


def on_gpu(test: Any) -> Any:
    return staticmethod(test)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpu") / "tiny", max_position_embeddings=16384)


class TestAbort:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, model: Path) -> Iterator[LiveServer]:
        keys = Keys({"alice": "key-a", "bob": "key-b"}, "root")
        # Small steps, so that a long prompt takes many.
        settings = GPU | {"kv_blocks": 2048, "max_running": test_abort.ROOM + 1, "max_batch_tokens": 32}
        with live_server(model, keys=keys, limit=5000, **settings) as server:
            yield server

    @pytest.fixture(autouse=True)
    def clean(self, server: LiveServer) -> Iterator[None]:
        yield
        asyncio.run(test_abort.idle(server))

    test_2 = on_gpu(test_abort.test_2_an_abort_lists_aborted_finished_and_unknown_requests)
    test_3 = on_gpu(test_abort.test_3_an_abort_is_answered_after_blocks_are_freed_and_the_client_has_the_end)
    test_4 = on_gpu(test_abort.test_4_the_request_id_aborts_every_choice_and_a_choice_id_only_that_one)
    test_5_streaming = on_gpu(test_abort.test_5_the_client_of_an_aborted_stream_gets_every_token_once)
    test_5_waiting = on_gpu(test_abort.test_5_the_client_of_an_aborted_complete_answer_gets_every_token_once)
    test_6_in_the_queue = on_gpu(test_abort.test_6_a_waiting_request_is_aborted_without_ever_running)
    test_6_in_its_prompt = on_gpu(test_abort.test_6_a_prefilling_request_is_aborted_at_the_next_step)
    test_6_frozen = on_gpu(test_abort.test_6_a_request_on_a_frozen_engine_is_aborted_at_once)
    test_7 = on_gpu(
        test_abort.test_7_aborting_twice_while_finishing_or_after_a_disconnect_is_bounded_and_leaves_nothing
    )


class TestPause:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, model: Path) -> Iterator[LiveServer]:
        with live_server(model, kv_blocks=2048, max_running=test_pause.ROOM, limit=5000, **GPU) as server:
            yield server

    @pytest.fixture(autouse=True)
    def clean(self, server: LiveServer) -> Iterator[None]:
        yield
        asyncio.run(test_pause.running_and_idle(server))

    test_17_abort = on_gpu(test_pause.test_17_18_23_twenty_streams_with_room_for_eight_are_paused_at_once)
    test_17_storm = on_gpu(test_pause.test_17_24_aborts_and_pauses_fired_two_hundred_times_in_any_order_hang_nothing)
    test_18_drain = on_gpu(test_pause.test_18_a_drain_finishes_started_requests_and_keeps_the_rest_for_later)
    test_18_freeze = on_gpu(test_pause.test_18_a_freeze_in_the_middle_of_thirty_two_seeded_streams_changes_nothing)
    test_19 = on_gpu(test_pause.test_19_a_paused_server_refuses_with_a_time_to_retry_or_queues_as_requested)
    test_20 = on_gpu(test_pause.test_20_a_drain_that_times_out_lists_the_requests_it_ended_and_is_paused)
    test_21 = on_gpu(test_pause.test_21_requests_that_arrive_while_a_pause_begins_are_paused_or_refused)
    test_22 = on_gpu(test_pause.test_22_clients_receive_the_end_before_a_pause_is_answered)
    test_24_twice = on_gpu(test_pause.test_24_concurrent_repeated_pauses_and_resumes_have_the_effect_of_one)
    test_24_cancelled = on_gpu(test_pause.test_24_a_resume_cancels_a_pending_pause_whose_middle_state_is_visible)
    test_59_sleep = on_gpu(test_pause.test_59_a_control_call_that_times_out_is_accepted_and_completed_later)


class TestWeights:
    """The weight tests with two engines, which share one GPU if there is no second."""

    @pytest.fixture(scope="class")
    @classmethod
    def old(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_model(tmp_path_factory.mktemp("old"), max_position_embeddings=8192)

    @pytest.fixture(scope="class")
    @classmethod
    def new(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_model(tmp_path_factory.mktemp("new"), seed=1, max_position_embeddings=8192)

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, old: Path) -> Iterator[LiveServer]:
        with live_server(old, kv_blocks=512, max_running=8, count=2, **GPU) as server:
            yield server

    @pytest.fixture(autouse=True)
    def clean(self, server: LiveServer, old: Path) -> Iterator[None]:
        yield

        async def main() -> None:
            await test_pause.pause(server)
            await test_weights.update(server, old)
            assert (await test_pause.resume(server)).result["state"] == "running"

        asyncio.run(main())

    test_25_refused = on_gpu(test_weights.test_25_weights_are_refused_unless_paused)
    test_25_new = on_gpu(
        test_weights.test_25_26_27_after_an_update_under_load_a_response_reports_the_weights_of_each_token
    )
    test_25_same = on_gpu(test_weights.test_25_the_same_weights_in_the_middle_of_seeded_streams_change_nothing)
    test_25_bad = on_gpu(
        test_weights.test_25_a_bad_update_under_load_reports_its_error_and_the_old_weights_keep_serving
    )
    test_sleep = on_gpu(test_weights.test_sleep_releases_memory_and_wakeup_allocates_it_again)
    test_26_flush = on_gpu(test_weights.test_26_a_flush_drops_cached_blocks_whenever_nothing_holds_them)


class TestTwoServersOnOneCard:
    @pytest.fixture(scope="class")
    @classmethod
    def both(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, LiveServer]]:
        served, settings = tiny_model(tmp_path_factory.mktemp("served")), test_http.ENGINE | GPU
        with live_server(served, **settings) as p, live_server(served, **settings) as d:
            yield p, d

    test_36 = on_gpu(test_http.test_36_an_answer_through_two_servers_equals_that_of_one)
    test_38 = on_gpu(test_http.test_38_a_client_that_disconnects_releases_the_kv)
    test_aborted = on_gpu(test_http.test_an_export_can_be_aborted_by_its_name)
    test_39 = on_gpu(test_http.test_39_a_ticket_that_cannot_be_used_is_a_local_prefill)


def test_36_preempted_streams_give_the_same_tokens(model: Path):
    bodies = [asking(200, prompt=f"{i} " + "x" * 40, temperature=i % 2, seed=i) for i in range(8)]

    async def ask(server: LiveServer) -> list[list[int]]:
        async with streaming(server.url, bodies) as streams:
            pass
        assert {each.end for each in streams} == {("length", "max_tokens")}
        return [each.tokens for each in streams]

    with live_server(model, kv_blocks=512, **GPU) as server:
        expected = asyncio.run(ask(server))
        assert server.status().preemptions == 0
    with live_server(model, kv_blocks=32, block_size=32, max_context=512, **GPU) as server:
        assert asyncio.run(ask(server)) == expected
        assert server.status().preemptions > 0 and server.status().held_blocks == 0
