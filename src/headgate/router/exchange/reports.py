"""Reports to the client: a worker's answer, an error, or an end that the router composes from the journal.

A report is the last part of the answer that a client receives. The functions here send one, or raise a RequestError,
which `sending` sends to the client instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headgate.contract.journal import released, released_tokens
from headgate.contract.limits import MOST_CHOICES
from headgate.errors import RequestError, Unavailable
from headgate.router.data_path.downstream import Downstream, HttpRequest
from headgate.router.data_path.request_info import RequestInfo
from headgate.router.exchange.attempt import JSON, Answered, Lost, Outcome, Streamed, Withheld, whole_answer
from headgate.router.exchange.client_answer import ClientAnswer
from headgate.router.exchange.ending import DEADLINE, PAUSE, End, as_aborted, final_answer, usage_of, wants_usage
from headgate.router.exchange.journal import Journal
from headgate.router.exchange.retry_state import RetryState
from headgate.router.fleet.worker import Worker


class WorkersFailed(RequestError):
    status = 502
    code = "worker_lost"


@dataclass(frozen=True, slots=True)
class EndReport:
    """An end that did not come from the worker that generated the answer.

    The router composed it, or another worker turned its token ids into text.
    """

    cut: bool  # the answer is incomplete because of an abort or a pause, not because of its deadline
    paused: bool  # it ended because of a pause, and no worker counts the request as ended


class Reported(Protocol):
    """The request that a report is about."""

    id: str
    created: int
    client: Downstream
    request: HttpRequest
    info: RequestInfo
    answer: ClientAnswer
    journal: Journal
    retry_state: RetryState | None
    last_attempt: tuple[Worker, Outcome] | None
    refusal: RequestError | None
    cause: str | None  # why the end was requested
    end_report: EndReport | None

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; negative after it."""

    @property
    def model(self) -> str: ...

    def no_worker(self) -> RequestError:
        """Return the error that says why no worker can take the request."""

    def count_failure(self, error: RequestError) -> None: ...


Subject = TypeVar("Subject", bound=Reported)


def sending(report: Callable[[Subject], None]) -> Callable[[Subject], None]:
    """Wrap `report` so that an error is sent to the client, and nothing to a client that has disconnected."""

    def act(exchange: Subject) -> None:
        if exchange.client.gone:
            return
        try:
            report(exchange)
        except RequestError as error:
            exchange.count_failure(error)
            exchange.answer.send_error(error)

    return act


def pass_on(exchange: Reported) -> None:
    assert exchange.last_attempt is not None
    conclude(exchange, *exchange.last_attempt)


def pass_text_on(exchange: Reported) -> None:
    """Send the answer of the worker that was asked to turn token ids into text, if it did."""
    assert exchange.last_attempt is not None
    worker, outcome = exchange.last_attempt
    if isinstance(outcome, Answered) and outcome.status != 200:
        return report_end(exchange)
    finishes = [choice.finish for choice in exchange.journal.choices.values()]
    cut = any(finish is not None and finish[0] == "abort" for finish in finishes)
    exchange.end_report = EndReport(cut=cut, paused=cut and exchange.cause == PAUSE)
    return conclude(exchange, worker, outcome)


def report_last(exchange: Reported) -> None:
    """Report the last outcome, because no worker can continue the answer."""
    last = None if exchange.retry_state is None else exchange.retry_state.last
    if last is None:
        raise exchange.no_worker()
    worker, outcome = last
    refused = isinstance(outcome, Lost) or (isinstance(outcome, Answered) and outcome.status == 503)
    left_s = exchange.left_s
    if refused and left_s is not None and left_s <= 0:
        # The deadline explains the end better than a worker that was paused or lost.
        exchange.cause = exchange.cause or DEADLINE
        return report_end(exchange)
    return conclude(exchange, worker, outcome)


def report_refusal(exchange: Reported) -> None:
    assert exchange.refusal is not None
    raise exchange.refusal


def report_closing(exchange: Reported) -> None:
    raise Unavailable("the router is shutting down", code="shutting_down")


def conclude(exchange: Reported, worker: Worker, outcome: Outcome) -> None:
    match outcome:
        case Streamed():
            exchange.answer.end_stream()
        case Answered():
            exchange.answer.send_whole(worker, outcome)
        case Withheld(_, ending):
            _release(exchange, worker, released(ending))
        case Lost(why):
            raise WorkersFailed(f"the worker was lost ({why}) and no other worker could continue the answer")


def _release(exchange: Reported, worker: Worker, ending: bytes) -> None:
    """Send an end that the worker withheld."""
    if exchange.info.stream:
        return exchange.answer.send_stream(worker, ending)
    answer = whole_answer(ending)
    if answer is None:
        raise WorkersFailed("the worker closed the response without a final event or error")
    return exchange.answer.send_whole(worker, answer)


def report_end(exchange: Reported) -> None:
    """Send the requested end, with the part of the answer that exists."""
    cause, stream = exchange.cause, exchange.info.stream
    assert cause is not None
    if cause == DEADLINE and not stream and withheld_end(exchange) is None:
        exchange.journal = exchange.journal.emptied()  # no worker returned the text: it is sent empty, with usage 0
    ends = [_end_of(exchange.journal, i, cause) for i in range(min(exchange.info.n, MOST_CHOICES))]
    finished = {i for i, choice in exchange.journal.choices.items() if choice.finish is not None}
    unfinished = [end for end in ends if end.index not in finished]
    last = withheld_end(exchange)
    exchange.end_report = EndReport(
        # A stream whose choices have all finished lacks only its closing event.
        cut=cause != DEADLINE and (bool(unfinished) or not stream),
        paused=cause == PAUSE and (last is None or last[1].cause != PAUSE),
    )
    if last is not None:
        exchange.journal.feed(released_tokens(last[1].ending))
        strict = _is_strict(exchange.request)
        return _release(exchange, last[0], as_aborted(released(last[1].ending), cause, strict=strict))
    return _send_end(exchange, cause, unfinished if stream else ends)


def _send_end(exchange: Reported, cause: str, ends: list[End]) -> None:
    stream = exchange.info.stream
    usage = (
        usage_of(exchange.journal)
        if not stream or wants_usage(exchange.request.path, exchange.request.body)
        else None
    )
    about = exchange.request.path, exchange.id, exchange.created, exchange.model, ends
    body = final_answer(*about, stream=stream, usage=usage, cause=cause, strict=_is_strict(exchange.request))
    if stream:
        exchange.answer.send_stream(None, body)
    else:
        exchange.answer.send_whole(None, Answered(200, JSON, body))


def _end_of(journal: Journal, index: int, cause: str) -> End:
    choice = journal.choices.get(index)
    if choice is None:
        return End(index, cause=cause)
    # Finished choices of a whole answer are included, because their text was lost with the worker.
    return End(index, choice.tokens, cause=cause, versions=choice.versions)


def withheld_end(exchange: Reported) -> tuple[Worker, Withheld] | None:
    """Return the end that the last worker withheld; None if the client has received more of the answer since."""
    if exchange.retry_state is None or exchange.retry_state.last is None:
        return None
    worker, outcome = exchange.retry_state.last
    if not isinstance(outcome, Withheld) or not outcome.cause:
        return None
    extent, before = exchange.journal.extent, exchange.retry_state.extent
    # A whole answer that was started again may have fewer tokens than the withheld one.
    outdated = extent != before or outcome.rescheduled if exchange.info.stream else extent > before
    return None if outdated else (worker, outcome)


def _is_strict(request: HttpRequest) -> bool:
    """Whether the client accepts only OpenAI's finish reasons in ends that the router composes."""
    return (request.header(b"x-openai-strict") or b"").lower() == b"true"
