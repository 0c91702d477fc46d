"""The error tree: what can go wrong, and whose fault it is.

HeadgateError
├── RequestError       the caller's mistake; has an HTTP status, a stable code and a parameter name
│   ├── ContextTooLong     the prompt, or prompt and answer together, do not fit
│   ├── DuplicateId        a live request already has this id
│   └── Unavailable        nothing wrong with the request: paused, full or shutting down; try again later
│       └── PdError            prefill and decode on two engines came to nothing, and would elsewhere; no other is called so
├── ModelError         the model folder cannot be served
│   ├── NotAModel          no config, no weights, or not a folder at all
│   ├── UnsupportedModel   a real checkpoint of a kind we do not know
│   ├── BrokenCheckpoint   a tensor is missing, has the wrong shape or dtype, or a file is cut short
│   ├── SourceLost         weights that were promised did not come: a file vanished, a trainer died or never came
│   └── HalfWritten        an update broke off after its first write; only a full one makes the model usable again
├── OutOfMemory        the machine is too small for what was asked
└── EngineDead         the engine process is gone and cannot answer
    ├── CannotStart        it never came up, and has itself said why on standard error
    ├── RankLost           one of the processes that compute a model together is gone, or does not answer in time
    └── Late               it is there, but has not answered in the time that it was given

This module imports nothing of ours, so everyone may import it.
"""

from __future__ import annotations


class HeadgateError(Exception):
    """Anything we raise on purpose."""


class RequestError(HeadgateError, ValueError):
    """The caller asked for something that cannot be done, and the message says what to change."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class DuplicateId(RequestError):
    status = 409
    code = "duplicate_request_id"


class Unavailable(RequestError):
    status = 503
    code = "unavailable"


class PdError(Unavailable):
    code = "pd_error"

    def __init__(self, message: str) -> None:
        super().__init__(f"PD Error: {message}")


class ModelError(HeadgateError):
    """The model cannot be served; the message names the file or tensor."""


class NotAModel(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class BrokenCheckpoint(ModelError):
    pass


class SourceLost(ModelError):
    pass


class HalfWritten(ModelError):
    pass


class OutOfMemory(HeadgateError):
    pass


class EngineDead(HeadgateError):
    pass


class CannotStart(EngineDead):
    pass


class RankLost(EngineDead):
    pass


class Late(EngineDead):
    pass
