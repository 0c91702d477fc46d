"""The tree of errors that Headgate raises, by cause.

HeadgateError
├── RequestError       a mistake of the caller; has an HTTP status, a stable code and a parameter name
│   ├── ContextTooLong     the prompt, or prompt and answer together, do not fit
│   ├── DuplicateId        a live request already has this id
│   └── Unavailable        the request is valid, but the server is paused, full or shutting down; try again later
│       └── PdError            disaggregated prefill failed and a retry would too; its message contains "PD Error"
├── ModelError         the model folder cannot be served
│   ├── NotAModel          no config, no weights, or not a folder at all
│   ├── UnsupportedModel   a valid checkpoint of an architecture that is not implemented
│   ├── BrokenCheckpoint   a tensor is missing, has the wrong shape or dtype, or a file is truncated
│   ├── SourceLost         announced weights did not arrive: a file vanished, or a trainer ended or never connected
│   └── HalfWritten        an update failed after its first write; only a full update makes the model usable again
├── OutOfMemory        the machine has too little memory for the configuration
└── EngineDead         the engine process is gone and cannot answer
    ├── CannotStart        the process never became ready, and has logged the reason to standard error
    ├── RankLost           a rank of a tensor-parallel engine is gone, or does not answer in time
    └── Late               the engine is running, but has not answered within its timeout

This module imports no other module of Headgate, so every module may import it.
"""

from __future__ import annotations


class HeadgateError(Exception):
    """Base class of all errors that Headgate raises on purpose."""


class RequestError(HeadgateError, ValueError):
    """The request cannot be carried out; the message states what to change."""

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
