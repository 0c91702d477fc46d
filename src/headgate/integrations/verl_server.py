"""The server of a verl replica: a `headgate serve` process, and verl's calls in terms of a `Fleet`. Needs nothing of verl.

It is the body of a Ray actor (`headgate.integrations.verl`). Requests and control calls run at once on its event loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headgate.client import AsyncFleet, FleetError, Sample
from headgate.cluster.fleet import Recipe, ServerProcess
from headgate.cluster.local import LocalLauncher

START_TIMEOUT_S = 600.0
DRAIN_TIMEOUT_S = 5.0
LOGPROBS_MODES = {"raw_logprobs": "raw", "processed_logprobs": "processed"}


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What a replica tells its server. `arguments` are those of `headgate serve`."""

    arguments: tuple[str, ...]
    prompt_length: int
    response_length: int
    max_model_len: int
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    logprobs_mode: str = "processed_logprobs"
    ignore_eos: bool = False
    frees_memory: bool = True  # whether `sleep` and `release_kv_cache` release memory
    standalone: bool = False  # has a GPU of its own, and never sleeps


def completion_fields(settings: RolloutSettings, prompt_tokens: int, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """verl's sampling parameters as fields of /v1/completions."""
    fields = {name: value for name, value in sampling.items() if value is not None}
    if fields.pop("prompt_logprobs", None) is not None:
        raise ValueError("headgate rollouts do not return prompt_logprobs; use another engine for a teacher")
    room = settings.max_model_len - prompt_tokens
    if room < 1:
        raise ValueError(f"prompt has {prompt_tokens} tokens; max_model_len is {settings.max_model_len}")
    budget = min(settings.response_length, settings.prompt_length + settings.response_length - prompt_tokens)
    most = fields.pop("max_new_tokens", budget)
    fields["max_tokens"] = max(1, min(fields.get("max_tokens", most), room))
    fields.setdefault("ignore_eos", settings.ignore_eos)
    if fields.pop("logprobs", False):
        fields |= {"logprobs": 0, "logprobs_mode": LOGPROBS_MODES[settings.logprobs_mode]}
    return fields


class RolloutServer:
    def __init__(self, settings: RolloutSettings) -> None:
        self._settings = settings
        self._admin_key = secrets.token_hex(16)
        self._steps: dict[int, int | None] = {0: None}  # training step by weight version
        self._process = ServerProcess(0, "mixed")

    async def launch(self) -> str:
        """Start the server; its address. The server ends with this process."""
        environ = {**self._settings.environ, "HEADGATE_ADMIN_KEY": self._admin_key}
        launcher = LocalLauncher(
            {"mixed": Recipe(self._settings.arguments, environ)}, drain_timeout_s=DRAIN_TIMEOUT_S
        )
        ready = asyncio.Event()
        self._running = asyncio.create_task(launcher.run(self._process, ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((self._running, waiting), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not ready.is_set():
            waiting.cancel()
            self._running.cancel()
            raise RuntimeError(f"headgate serve did not start: {self._process.error or 'see its log'}")
        self._fleet = AsyncFleet(self._process.url, self._admin_key)
        return self._process.url.removeprefix("http://")

    async def shutdown(self) -> None:
        self._running.cancel()
        await asyncio.wait((self._running,))

    # ------------------------------------------------------------------------------------------------------- generation

    async def sample(self, prompt_ids: Iterable[int], sampling: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        """The fields of verl's `TokenOutput`."""
        prompt = [int(token) for token in prompt_ids]
        fields = completion_fields(self._settings, len(prompt), sampling)
        try:
            sample = await self._fleet.generate(prompt, request_id=request_id, **fields)
        except FleetError as error:
            if error.code != "paused":
                raise
            return self._output([], None, "aborted", [])
        log_probs = sample.logprobs if "logprobs" in fields else None
        return self._output(sample.token_ids, log_probs, _stop_reason(sample), sample.weight_versions)

    def _output(
        self, token_ids: list[int], log_probs: list[float] | None, stop_reason: str, versions: Sequence[int]
    ) -> dict[str, Any]:
        """`global_steps` is of the last token; an answer may have tokens of several steps."""
        steps = [self._steps.get(version) for version in versions or [max(self._steps)]]
        known = [step for step in steps if step is not None]
        extra = {"global_steps": steps[-1], "min_global_steps": min(known, default=None)}
        extra["max_global_steps"] = max(known, default=None)
        return {"token_ids": token_ids, "log_probs": log_probs, "stop_reason": stop_reason, "extra_fields": extra}

    # ---------------------------------------------------------------------------------------------------------- control

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, int]:
        """End all requests with their partial answers. New ones wait for `resume_generation`, or end at once."""
        state = await self._fleet.pause("abort", new_requests="reject" if reject_request else "queue")
        return {"aborted_count": state.aborted}

    async def resume_generation(self) -> None:
        await self._fleet.resume()

    async def wait_for_requests_to_drain(self) -> None:
        await self._fleet.wait_idle()

    async def clear_kv_cache(self) -> None:
        await self._fleet.flush_cache()

    async def release_kv_cache(self) -> None:
        if self._settings.frees_memory:
            await self._fleet.sleep("kv_cache")

    async def resume_kv_cache(self) -> None:
        if self._settings.frees_memory:
            await self._fleet.wakeup("kv_cache")

    async def sleep(self) -> None:
        if self._settings.frees_memory and not self._settings.standalone:
            await self._fleet.pause("abort", new_requests="queue")
            await self._fleet.sleep()

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Allocate memory again; the server runs as soon as nothing is asleep."""
        if self._settings.standalone or not (await self._fleet.state()).is_paused:
            return
        if not (await self._fleet.wakeup(*tags)).asleep:
            await self._fleet.resume()

    async def update_weights(self, path: str, global_steps: int | None = None) -> None:
        """Load a file. A server that runs keeps its requests, which continue with the new weights."""
        running = not (await self._fleet.state()).is_paused
        if running:
            await self._fleet.pause("freeze", new_requests="queue")
        try:
            label = None if global_steps is None else str(global_steps)
            state = await self._fleet.update_weights(path, label=label)
            self._steps[state.weight_version] = global_steps
        finally:
            if running:
                await self._fleet.resume()

    async def start_profile(self, **options: Any) -> None:
        """Nothing: the server has no profiler."""

    async def stop_profile(self) -> None:
        """Nothing: the server has no profiler."""


def _stop_reason(sample: Sample) -> str:
    return "aborted" if sample.cut else "completed"
