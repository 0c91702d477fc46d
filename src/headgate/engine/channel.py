"""The connection between clients and an engine: ZeroMQ sockets, one msgpack message per frame.

The engine side has its own thread, so that pings are answered while a step runs; only that thread uses the router
socket. The step loop passes outgoing frames to that thread through an in-process socket pair. If a frame cannot be
decoded, the engine logs and drops it, because only a peer that did not pass the handshake can send one; a client
treats the engine as dead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from headgate.errors import EngineDead
from headgate.protocol.message import (
    PROTOCOL,
    CommandAnswer,
    EngineInfo,
    EngineStatus,
    FromClient,
    FromEngine,
    Hello,
    Message,
    Ping,
    Pong,
    StepOutputs,
    Welcome,
)

log = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

POLL_MS = 500
WAKE = b""
# The errors that a decoder raises for arbitrary bytes.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class EngineChannel:
    """The engine side: answers handshakes and pings itself, and passes other messages to the step loop."""

    def __init__(
        self,
        address: str,
        info: EngineInfo,
        *,
        post: Callable[[Message], None],
        status: Callable[[], tuple[float, EngineStatus]],
    ) -> None:
        self._info = info
        self._post = post
        self._status = status
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set_hwm(0)  # no limit: messages to a slow client queue here, bounded by its requests
        self._router.bind(address)
        self._outbox = self._pair(zmq.PULL, bind=True)
        self._sender = self._pair(zmq.PUSH, bind=False)  # used by the step loop
        self._thread = threading.Thread(target=self._serve, name="headgate-channel", daemon=True)

    def _pair(self, kind: int, *, bind: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        (socket.bind if bind else socket.connect)("inproc://outbox")
        return socket

    def start(self) -> None:
        self._thread.start()

    def send(self, client: int, message: StepOutputs | CommandAnswer) -> None:
        """Queue a message for a client. Only the step loop may call this."""
        self._sender.send_multipart((_identity(client), _encoder.encode(message)))

    def close(self, timeout_s: float = 5.0) -> None:
        self._closing.set()
        self._sender.send(WAKE)
        self._thread.join(timeout_s)
        self._sender.close()
        self._context.destroy(linger=1000)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._outbox, zmq.POLLIN)
        # Frames that the step loop has passed on are sent even after `close`.
        while not self._closing.is_set() or self._outbox.poll(0):
            ready = dict(poller.poll(POLL_MS))
            if self._outbox in ready and (frames := self._outbox.recv_multipart()) != [WAKE]:
                self._router.send_multipart(frames)
            if self._router in ready:
                self._receive(*self._router.recv_multipart())

    def _receive(self, identity: bytes, *frames: bytes) -> None:
        try:
            message = _from_client.decode(b"".join(frames))
        except UNREADABLE as error:
            log.warning("dropped a message of %d bytes that cannot be decoded: %s", sum(map(len, frames)), error)
            return
        match message:
            case Hello(protocol):
                if protocol != PROTOCOL:
                    log.warning("refused a client that speaks protocol %d; this engine speaks %d", protocol, PROTOCOL)
                self._answer(identity, Welcome(PROTOCOL, self._info))
            case Ping(number):
                quiet_s, status = self._status()
                self._answer(identity, Pong(number, quiet_s, status))
            case _:
                self._post(message)

    def _answer(self, identity: bytes, message: FromEngine) -> None:
        self._router.send_multipart((identity, _encoder.encode(message)))


class ClientChannel:
    """The client side, on the event loop. Sending never blocks; ZeroMQ queues what cannot be sent yet."""

    def __init__(self, address: str, client: int) -> None:
        self._context = zmq.asyncio.Context()
        try:
            self._socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            self._context.term()
            raise EngineDead(f"cannot create a socket for the engine: {error}") from error
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, _identity(client))
        self._socket.connect(address)
        self._outgoing: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)

    def send(self, message: FromClient) -> None:
        """Raises EngineDead if the message cannot even be queued."""
        try:
            self._outgoing.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineDead(f"nothing can be sent to the engine: {error}") from error
        # ZeroMQ signals an incoming message only once, and a send may consume the signal: a waiting `receive` would
        # then wait for ever. Reading the events of the asyncio socket makes that socket check again.
        self._socket.get(zmq.EVENTS)

    async def receive(self) -> FromEngine:
        """Raises EngineDead for a message that cannot be decoded, because its content is lost."""
        frame = await self._socket.recv()
        try:
            return _from_engine.decode(frame)
        except UNREADABLE as error:
            raise EngineDead(f"the engine sent a message that cannot be decoded: {error}") from error

    def close(self) -> None:
        self._socket.close()
        self._context.destroy(linger=0)


def _identity(client: int) -> bytes:
    return b"client-%d" % client
