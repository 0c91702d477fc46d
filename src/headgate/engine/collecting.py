"""Commands for weight updates that arrive in parts: join a trainer's group, receive a part, discard all parts.

They may run while the engine serves requests, because parts are kept apart from the weights in use. A collection ends
when it is loaded (`UpdateWeights(StagedSource())`), when a part fails, or when no part arrives for `idle_s`. After a
failure, the reason is kept until the next part, so that the command which would load the parts can report it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from headgate.errors import ModelError, OutOfMemory, RequestError, SourceLost, Unavailable
from headgate.protocol.command import Collected, CollectWeights, DiscardWeights, JoinGroup, LeaveGroup, Part

log = logging.getLogger(__name__)

T = TypeVar("T")
NEVER_S = float("inf")
Until = Callable[[Callable[[], bool], float], Generator[None, None, bool]]
CollectCommand = JoinGroup | LeaveGroup | CollectWeights | DiscardWeights


class Wires(Protocol):
    """Receives tensors from trainers, in parts; implemented by `WeightWires`."""

    def __len__(self) -> int: ...

    def join(self, command: JoinGroup) -> Future[None]: ...

    def leave(self, name: str) -> bool: ...

    def receive(self, part: Part, *, anew: bool, timeout_s: float) -> Future[Any]: ...

    def add(self, part: Part, tensors: Any) -> Collected: ...

    def discard(self) -> None: ...

    def close(self) -> None: ...


class Collecting:
    """Runs the commands that collect a weight update in parts.

    `now_s` is the time of the current turn; `until` waits for a condition while steps run; `wake` ends the sleep of
    the step loop.
    """

    def __init__(
        self, wires: Wires | None, *, now_s: Callable[[], float], until: Until, wake: Callable[[], None]
    ) -> None:
        self._wires = wires
        self._now_s = now_s
        self._until = until
        self._wake = wake
        self._receiving = 0
        self.deadline_s = NEVER_S
        self.failure = ""

    def run(self, command: CollectCommand) -> Generator[None, None, Collected]:
        self.refuse_several_ranks()
        wires = self._wires
        assert wires is not None
        match command:
            case JoinGroup():
                yield from self._join(wires, command)
            case LeaveGroup(name):
                if not wires.leave(name):
                    raise RequestError(f"there is no group {name!r}", param="group_name", code="no_group")
            case CollectWeights():
                return (yield from self._collect(wires, command))
            case DiscardWeights(reason):
                self.drop(reason)
        return Collected(len(wires))

    def expire(self) -> None:
        """Drop the collected parts if no further part has arrived in time."""
        if self._now_s() >= self.deadline_s and not self._receiving:
            self.drop("the trainer has sent no further part in time")

    def drop(self, reason: str) -> None:
        self.deadline_s = NEVER_S
        if self._wires is not None and len(self._wires):
            self._wires.discard()
            self.failure = reason
            log.warning("dropped the collected parts of a weight update: %s", reason or "as requested")

    def refuse_unless_collected(self) -> None:
        """Raise if no parts have been collected; the error says why parts were dropped, if they were."""
        self.refuse_several_ranks()
        if self._wires is None or not len(self._wires):
            why = f"the update has failed: {self.failure}" if self.failure else "no tensor has arrived"
            raise _refused(f"{why}; the weights are unchanged", "no_update", 409)

    def refuse_several_ranks(self, what: str = "collect an update in parts") -> None:
        if self._wires is None:
            message = f"this engine has several ranks and cannot {what}; send the whole model as files (path)"
            raise RequestError(message, code="unsupported_transfer")

    def loaded(self) -> None:
        self.deadline_s, self.failure = NEVER_S, ""

    def close(self) -> None:
        if self._wires is not None:
            self._wires.close()

    def _join(self, wires: Wires, command: JoinGroup) -> Generator[None, None, None]:
        self.failure = ""
        try:
            yield from self._done(wires.join(command), command.timeout_s)
        except ModelError as error:
            wires.leave(command.name)
            raise _not_joined(error) from error

    def _collect(self, wires: Wires, command: CollectWeights) -> Generator[None, None, Collected]:
        self.failure = ""
        self._receiving += 1
        try:
            receiving = wires.receive(command.part, anew=command.anew, timeout_s=command.timeout_s)
            state = wires.add(command.part, (yield from self._done(receiving, command.timeout_s)))
        except OutOfMemory as error:
            self.drop(str(error))
            raise Unavailable(f"{error}; the weights are unchanged", code="out_of_memory") from error
        except ModelError as error:
            self.drop(str(error))
            raise _not_received(error) from error
        except RequestError as error:
            self.drop(error.message)
            raise
        finally:
            self._receiving -= 1
        self.deadline_s = self._now_s() + command.idle_s if state.tensors else NEVER_S
        return state

    def _done(self, future: Future[T], timeout_s: float) -> Generator[None, None, T]:
        """Yield until `future` is done, and return its result.

        The receiver ends the future at its own timeout; the deadline here, one second later, is a second defence.
        """
        future.add_done_callback(lambda _: self._wake())
        if not (yield from self._until(future.done, self._now_s() + timeout_s + 1)):
            raise SourceLost("the trainer has not answered in time")
        return future.result()


def _not_joined(error: ModelError) -> RequestError:
    lost = isinstance(error, SourceLost)
    return _refused(str(error), "source_lost" if lost else "unsupported_transfer", 502 if lost else 400)


def _not_received(error: ModelError) -> RequestError:
    lost = isinstance(error, SourceLost)
    message = f"the part is refused, and the weights are unchanged: {error}"
    return _refused(message, "source_lost" if lost else "bad_weights", 502 if lost else 400)


def _refused(message: str, code: str, status: int) -> RequestError:
    error = RequestError(message, code=code)
    error.status = status
    return error
