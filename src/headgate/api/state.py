"""The dependencies of every handler: engines, tokenizer, limits, and the ledger of requests.

Each process has one `Api`, in `app.state.api`; it does not change while the server runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from starlette.requests import Request

from headgate.api.accounting.ledger import Ledger
from headgate.api.engines import Engines
from headgate.api.weight_labels import WeightLabels
from headgate.contract.limits import MOST_CHOICES
from headgate.contract.sampling import LogprobsMode
from headgate.edge.admission import Admission
from headgate.edge.departures import Departures
from headgate.errors import RequestError
from headgate.protocol.request import Pooling
from headgate.text.parsers.reader import AnswerParsers
from headgate.text.template import ChatTemplate
from headgate.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

# Shorter inputs are tokenised on the event loop, which takes less time than a thread switch.
LONG_TEXT = 4096
TEXT_THREADS = 2
TEXT_QUEUE = 1024  # the most texts that may wait for a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    max_choices: int = MOST_CHOICES  # per request
    logprobs_mode: LogprobsMode = "raw"  # unless the request, or the API that it uses, has another one
    sampling: Mapping[str, float] = field(default_factory=dict)  # parameters of requests that do not set them
    keep_alive_s: float = 15.0  # the longest silence of a stream
    pooling: Pooling = "last"  # of embeddings


@dataclass(frozen=True, kw_only=True)
class Api:
    engines: Engines
    ledger: Ledger
    model_name: str
    created: int  # when the model was loaded, in seconds since 1970
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    parsers: AnswerParsers = field(default_factory=AnswerParsers)  # how the model writes reasoning and tool calls
    settings: ApiSettings = ApiSettings()
    labels: WeightLabels = field(default_factory=WeightLabels)
    departures: Departures = field(default_factory=lambda: Departures(log))
    warned: list[str] = field(default_factory=list)  # warnings that were logged: each is logged once
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
    )
    turns: Admission = field(init=False)  # queues the users of `pool` fairly among tenants

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", Admission(TEXT_THREADS, TEXT_QUEUE, self.ledger.sharing))

    @cached_property
    def marker_ids(self) -> frozenset[int]:
        """The special tokens that the parsers of answers need."""
        if self.tokenizer is None:
            return frozenset()
        ids = map(self.tokenizer.backend.token_to_id, self.parsers.markers)
        return self.tokenizer.special_ids.intersection(ids)

    @property
    def required_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises if the model has none."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; send and request token ids")
        return self.tokenizer

    async def off_loop(self, share: str, size: int, work: Callable[[], T]) -> T:
        """Run `work` on `size` characters or tokens: on the event loop if they are few, otherwise in a thread.

        Tenants share the threads fairly; `share` is the share that the caller uses.
        """
        if size < LONG_TEXT:
            return work()
        self.ledger.sharing.takes(share)
        await self.turns.enter(share)
        working = asyncio.get_running_loop().run_in_executor(self.pool, work)
        working.add_done_callback(lambda done: self._leave(share, done))
        # Cancelling the caller does not stop the thread, which keeps its place until it is done.
        return await asyncio.shield(working)

    def _leave(self, share: str, done: asyncio.Future[T]) -> None:
        self.turns.leave(share)
        if not done.cancelled():
            done.exception()  # marks it as retrieved; the caller receives it unless it was cancelled


def api_of(request: Request) -> Api:
    api: Api = request.app.state.api
    return api
