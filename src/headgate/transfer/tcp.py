"""KV transfer over TCP: one thread per engine, non-blocking sockets, bytes read and written directly in the cache.

The thread owns all sockets. The step loop passes commands to it through a queue and wakes it through a socket; both
share the table of offers. A connection that misbehaves is closed without affecting others.
"""

from __future__ import annotations

import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue

import msgspec

from headgate.errors import RequestError
from headgate.protocol.message import TransferCounts
from headgate.protocol.plan import Fetch
from headgate.protocol.request import Ticket
from headgate.transfer.fetching import Dropped, FetchClient, FetchSettings
from headgate.transfer.frames import BadFrame
from headgate.transfer.link import Link, PeerGone
from headgate.transfer.serving import LeaseServer, Offer, ServingSettings
from headgate.transfer.transport import BlockMemory, Event, Fetched, Post

log = logging.getLogger(__name__)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

TICK_S = 0.05
UNATTACHED_S = 5.0  # how long a peer may be connected without having attached to a lease
MOST_CONNECTIONS = 4096
BUFFER_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


def parse_address(text: str) -> Address:
    """Parse `HOST:PORT` with an IP address. Raises ValueError if it is malformed."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    ip = ipaddress.ip_address(host.strip("[]"))  # IP addresses only, because a DNS lookup would block
    return Address(str(ip), int(port))


class TcpTransport:
    def __init__(
        self,
        memory: BlockMemory,
        listen: Address,
        *,
        peers: tuple[Network, ...],
        lease_s: float,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._peers, self._clock = memory, peers, clock
        self._listener = _listen(listen)
        self.address = str(Address(listen.host, self._listener.getsockname()[1]))
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._offers: dict[int, Offer] = {}
        self._offers_lock = threading.Lock()
        self._serving = ServingSettings(memory, self._offers.get, self._post_event, lease_s, clock)
        self._fetching = FetchSettings(memory, wait_s, clock)
        self._servers: set[LeaseServer] = set()
        self._clients: dict[int, FetchClient | None] = {}  # by sequence; None: connection lost before `fetch`
        self._detaching: dict[FetchClient, None] = {}  # abandoned, but not attached yet
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._post: Post = lambda _: None
        self._next_tick_s = -inf
        self._received = self._sent = 0
        self._seconds = 0.0
        self._failures: Counter[str] = Counter()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="headgate-transfer", daemon=True)

    # -- called by the engine's loop ---------------------------------------------

    def start(self, post: Post) -> None:
        self._post = post
        for sock in (self._waker, self._woken, self._listener):
            sock.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()

    def attach(self, id: int, ticket: Ticket) -> None:
        self._do(lambda: self._attach(id, ticket))

    def fetch(self, fetch: Fetch) -> None:
        self._do(lambda: self._fetch(fetch))

    def leave(self, id: int) -> None:
        self._do(lambda: self._leave(id))

    def offer(self, lease: int, generation: int, version: int, blocks: tuple[int, ...]) -> None:
        with self._offers_lock:
            self._offers[lease] = Offer(lease, generation, version, blocks)

    def fill(self, lease: int, blocks: int) -> None:
        self._offers[lease].filled = blocks
        self._wake()

    def withdraw(self, lease: int) -> None:
        with self._offers_lock:
            self._offers.pop(lease).withdrawn = True
        self._wake()

    def settle(self) -> Future[None]:
        settled: Future[None] = Future()
        self._do(lambda: self._settle(settled))
        return settled

    def counts(self) -> TransferCounts:
        return TransferCounts(self._received, self._sent, self._seconds, dict(self._failures))

    def close(self) -> None:
        self._closed = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(10.0)
        for sock in (self._waker, self._woken, self._listener):
            sock.close()

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake()

    def _wake(self) -> None:
        # If the socket is full, the thread is already being woken; if it is closed, the thread has ended.
        with suppress(BlockingIOError, OSError):
            self._waker.send(b".")

    # -- the thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        finally:
            self._run_commands()
            for id in list(self._clients):
                self._leave(id)
            for client in list(self._detaching):
                self._detach(client)
            for server in list(self._servers):
                self._close_server(server)
            self._selector.close()

    def _turn(self, poll_timeout_s: float = TICK_S) -> None:
        for key, mask in self._selector.select(poll_timeout_s):
            if key.fileobj is self._woken:
                self._run_commands()
            elif key.fileobj is self._listener:
                self._accept()
            elif key.data.sock.fileno() >= 0:  # skip a connection that was closed earlier in this turn
                self._guard(key.data, mask)
        if (now_s := self._clock()) >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._tick(now_s)

    def _run_commands(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        with suppress(Empty):
            while True:
                self._commands.get_nowait()()
        for server in list(self._servers):
            if server.offer is not None:
                self._guard(server, selectors.EVENT_WRITE)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a transfer connection cannot be accepted: %s", error)
            time.sleep(TICK_S)  # most likely there are no free file descriptors, and accept would fail again at once
            return
        if len(self._servers) >= MOST_CONNECTIONS:
            sock.close()
            return
        _tune(sock)
        server = self._server(sock)
        self._servers.add(server)
        self._selector.register(sock, server.events, server)

    def _server(self, sock: socket.socket) -> LeaseServer:
        return LeaseServer(sock, self._serving)

    def _client(self, sock: socket.socket, id: int, ticket: Ticket) -> FetchClient:
        return FetchClient(sock, id, ticket, self._fetching)

    def _post_event(self, event: Event) -> None:
        self._post(event)

    def _tick(self, now_s: float) -> None:
        for client in [*self._clients.values(), *self._detaching]:
            if client is not None:
                self._guard(client, 0, now_s)
        for server in list(self._servers):
            if (server.offer is None or server.closing) and now_s - server.since_s >= UNATTACHED_S:
                self._close_server(server)

    def _guard(self, link: Link, mask: int, tick_s: float | None = None) -> None:
        """Advance a connection. Any error closes that connection only."""
        try:
            self._advance(link, mask, tick_s)
        except (PeerGone, Dropped) as error:
            self._lose(link, str(error))
        except (BadFrame, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("a transfer connection is closed: %s", error)
            self._lose(link, "corrupt")
        except Exception:
            log.exception("a transfer connection is closed after an internal error")
            self._lose(link, "internal")

    def _advance(self, link: Link, mask: int, tick_s: float | None) -> None:
        if isinstance(link, FetchClient):
            if tick_s is not None:
                link.tick(tick_s)
            if not link.connected:
                if not mask & selectors.EVENT_WRITE:
                    return
                link.connect()
        if mask & selectors.EVENT_READ and (came := link.receive()):
            self._received += came
            if isinstance(link, FetchClient):
                link.last_progress_s = self._clock()
        self._sent += link.send()
        if isinstance(link, FetchClient) and link.fetched:
            self._end(link, ok=True)
        elif isinstance(link, FetchClient) and link in self._detaching and link.attached:
            self._detach(link)
        else:
            if link.closing and not link.wants_to_send:
                with suppress(OSError):
                    link.sock.shutdown(socket.SHUT_WR)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_to_send else 0)
            if events != link.events:
                self._selector.modify(link.sock, events, link)
                link.events = events

    def _lose(self, link: Link, why: str) -> None:
        if isinstance(link, LeaseServer):
            self._close_server(link)
        elif link in self._detaching:
            self._detach(link)
        elif isinstance(link, FetchClient):
            self._failures[why] += 1
            log.info("KV for sequence %d is lost: %s", link.id, why)
            self._end(link, ok=False)

    def _close_server(self, server: LeaseServer) -> None:
        self._servers.discard(server)
        self._close(server)
        server.release()

    def _settle(self, settled: Future[None]) -> None:
        # Data is sent directly from the cache, so connections that are sending must end first.
        for server in list(self._servers):
            self._close_server(server)
        settled.set_result(None)

    def _close(self, link: Link) -> None:
        with suppress(KeyError):
            self._selector.unregister(link.sock)
        link.sock.close()

    # -- fetching -----------------------------------------------------------------

    def _attach(self, id: int, ticket: Ticket) -> None:
        self._clients[id] = None
        try:
            sock = self._connect(ticket)
        except (OSError, ValueError) as error:
            self._failures["unreachable"] += 1
            log.info("KV for sequence %d is lost: %s", id, error)
            return
        client = self._clients[id] = self._client(sock, id, ticket)
        self._selector.register(sock, client.events, client)

    def _connect(self, ticket: Ticket) -> socket.socket:
        address = parse_address(ticket.engine)
        ip = ipaddress.ip_address(address.host)
        if not any(ip in network for network in self._peers):
            raise ValueError(f"this engine may not fetch from {ip}: it is not in kv_peers")
        sock = socket.socket(address.family)
        try:
            _tune(sock)
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect((address.host, address.port))
        except OSError:
            sock.close()
            raise
        return sock

    def _fetch(self, fetch: Fetch) -> None:
        client = self._clients.get(fetch.id)
        if client is None:
            self._clients.pop(fetch.id, None)
            self._post(Fetched(fetch.id, ok=False))
            return
        client.begin(fetch)
        self._guard(client, 0)

    def _leave(self, id: int) -> None:
        client = self._clients.pop(id, None)
        if client is None:
            return
        if client.attached or (client.connected and client.fetch is not None):
            self._close(client)
            client.release()
        else:
            # Close only after the lease is attached: P then ends the lease, instead of keeping it until it expires.
            self._detaching[client] = None
        self._post_end(client, ok=False)

    def _detach(self, client: FetchClient) -> None:
        del self._detaching[client]
        self._close(client)
        client.release()

    def _end(self, client: FetchClient, *, ok: bool) -> None:
        self._close(client)
        client.release()
        del self._clients[client.id]
        if client.fetch is None:
            self._clients[client.id] = None  # a later fetch then fails at once
        self._post_end(client, ok=ok)

    def _post_end(self, client: FetchClient, *, ok: bool) -> None:
        """Report the end of the fetch, if there was one, exactly once."""
        fetch, client.fetch = client.fetch, None
        if fetch is not None:
            self._seconds += self._clock() - client.began_s
            self._post(Fetched(client.id, ok))


def _listen(address: Address) -> socket.socket:
    try:
        return socket.create_server((address.host, address.port), family=address.family, backlog=256)
    except OSError as error:
        raise RequestError(f"KV cannot be served at {address}: {error.strerror}; choose another kv_listen") from error


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
