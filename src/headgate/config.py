"""Configuration of engines, servers and routers: frozen, validated once, passed down explicitly.

None means that the value is derived from the checkpoint, the machine or the free memory. This module imports only
`errors` and `logs` of Headgate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Literal

from headgate.errors import RequestError
from headgate.logs import LogFormat

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,]+")  # as browsers write it
BACKENDS = ("auto", "torch", "cpu", "triton")
# Of `headgate.text.parsers.families`, with `auto` and `none`.
REASONING_PARSERS = ("auto", "none", "gpt_oss", "mistral", "ernie45", "glm45", "deepseek_r1", "qwen3")
TOOL_PARSERS = (
    "auto",
    "none",
    "gpt_oss",
    "deepseek_v3",
    "glm45",
    "qwen3_coder",
    "granite",
    "hermes",
    "mistral",
    "pythonic",
    "llama3_json",
)
KV_TRANSPORTS = ("auto", "tcp", "nixl")
PREEMPTED = ("recompute", "reschedule")
LOOPBACK = ("127.0.0.0/8", "::1/128")
DTYPES = ("auto", "float32", "bfloat16", "float16")
FP8 = ("none", "weights", "kv", "both")
LogprobsMode = Literal["raw", "scaled", "processed"]
Pooling = Literal["last", "mean"]


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RequestError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: our certificate with its key, and the CAs that the other side's certificate is verified with."""

    certificate: Path | None = None  # with the intermediate certificates
    key: Path | None = None  # not encrypted
    ca: Path | None = None  # None: the system's CAs for a client; a server then accepts clients without certificate

    def __post_init__(self) -> None:
        _check((self.certificate is None) == (self.key is None), "a certificate and its key must be given together")


SYSTEM_CAS = TlsFiles()  # verifies with the system's CAs, and has no certificate of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    device: str = "auto"  # auto, cpu, cuda, cuda:1 ...
    dtype: str = "auto"  # auto: the checkpoint's dtype
    fp8: str = "none"  # none, weights, kv or both: what is stored in FP8, on a GPU
    backend: str = "auto"  # auto, torch (the reference), cpu (compiled kernels), triton
    deterministic: bool = False  # answers are bitwise identical whatever else is running
    tensor_parallel: int = 1  # ranks: processes that compute one model together, each with a part of it
    max_context: int | None = None  # tokens of prompt and answer together
    max_running: int = 256  # sequences running at once
    max_batch_tokens: int | None = None  # tokens computed in one step
    kv_blocks: int | None = (
        None  # size of the KV cache in blocks of `block_size` tokens of all layers; None: what fits
    )
    block_size: int = 32  # tokens per KV block
    memory_fraction: float = 0.5  # share of the memory left free by the weights that is used for KV
    run_ahead: int | None = None  # steps queued on the device at once
    graphs: bool = True  # run decode steps as CUDA graphs, on CUDA devices
    prompt_graphs: bool = False  # other steps too: short prompts are answered sooner, but decoding is 2 to 5 % slower
    routed_experts: bool = False  # keep the experts of all tokens beside their KV, so that requests can ask for them
    kv_transport: str = "auto"  # auto (within one GPU if both engines share it, else tcp), tcp or nixl
    kv_listen: str | None = "127.0.0.1:0"  # where other engines fetch KV; None: no KV transfer in either direction
    kv_peers: tuple[str, ...] = LOOPBACK  # networks that KV may be fetched from
    lease_s: float = 30.0  # how long KV is kept for an engine that does not renew its lease
    kv_wait_s: float = 10.0  # how long a KV transfer may make no progress before the prompt is computed locally
    export_wait_s: float = 30.0  # how long a request to export KV may wait for a row and blocks
    on_preempt: str = "recompute"  # or reschedule: end a preempted request, to be resumed on another server
    crash_folder: str | None = None  # where an engine writes its last plans when it crashes; None: a temporary folder

    def __post_init__(self) -> None:
        _check(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        _check(self.fp8 in FP8, f"fp8 must be one of {', '.join(FP8)}, not {self.fp8!r}")
        _check(bool(DEVICE.fullmatch(self.device)), f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        _check(self.backend in BACKENDS, f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        _check(self.block_size in (16, 32, 64), "block_size must be 16, 32 or 64")
        _check(0 < self.memory_fraction <= 1, "memory_fraction must be above 0 and at most 1")
        _check(
            self.kv_transport in KV_TRANSPORTS, f"kv_transport must be auto, tcp or nixl, not {self.kv_transport!r}"
        )
        _check_addresses(self.kv_listen, self.kv_peers)
        _check(self.on_preempt in PREEMPTED, f"on_preempt must be recompute or reschedule, not {self.on_preempt!r}")
        for name in ("lease_s", "kv_wait_s", "export_wait_s"):
            _check(getattr(self, name) > 0, f"{name} must be above 0")
        for name in ("max_context", "max_running", "max_batch_tokens", "kv_blocks", "run_ahead", "tensor_parallel"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"{name} must be at least 1")

    def for_replica(self, index: int) -> EngineConfig:
        """Return the config of one of several engines, whose KV ports are consecutive."""
        if self.kv_listen is None:
            return self
        host, _, port = self.kv_listen.rpartition(":")
        return replace(self, kv_listen=f"{host}:{int(port) + index if int(port) else 0}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The router that a server registers with, and the role it takes."""

    router: str  # the router's address, http://HOST:PORT
    role: str = "mixed"  # mixed, prefill, decode
    key: str | None = field(default=None, repr=False)  # the router's admin key
    url: str | None = None  # this server's URL at the router; None: the address it is reached at
    tls: TlsFiles = SYSTEM_CAS  # for a router with https://

    def __post_init__(self) -> None:
        for what, url in (("router", self.router), ("server", self.url or self.router)):
            _check(url.startswith(("http://", "https://")), f"a {what} is http://HOST:PORT, not {url}")


def _check_origins(origins: tuple[str, ...]) -> None:
    for origin in origins:
        _check(
            origin == "*" or ORIGIN.fullmatch(origin) is not None,
            f"an origin is * or SCHEME://HOST[:PORT] without a path, not {origin!r}",
        )


def _check_addresses(listen: str | None, peers: tuple[str, ...]) -> None:
    try:
        for peer in peers:
            ip_network(peer)
    except ValueError as error:
        raise RequestError(f"kv_peers must be networks such as 10.0.0.0/8: {error}") from None
    if listen is None:
        return
    host, _, port = listen.rpartition(":")
    try:
        reachable = not ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        reachable = False  # host names are refused: resolving one would delay transfers
    _check(
        reachable and port.isdecimal() and int(port) <= 65535,
        f"kv_listen must be IP:PORT, with an IP address that other engines can reach, not {listen!r}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    model: Path  # a folder or a GGUF file
    model_name: str  # the model's name in the API
    engine: EngineConfig = EngineConfig()  # config of each engine
    replicas: int = 1  # engine processes
    host: str = "127.0.0.1"  # address to bind
    tls: TlsFiles | None = None  # serve HTTPS with this certificate; None: HTTP
    logprobs_mode: LogprobsMode = "raw"  # for requests that do not set it
    pooling: Pooling = "last"  # of embeddings
    sampling: Mapping[str, float] = field(default_factory=dict)  # parameters of requests that do not set them
    reasoning_parser: str = "auto"  # auto (by the chat template), none, or a family in docs/models.md
    tool_parser: str = "auto"  # likewise
    cors_origins: tuple[str, ...] = ()  # web pages that browsers let call the API: http://HOST:PORT, or *
    max_queue: int = 1024  # choices accepted beyond those that run
    max_body_bytes: int = 32 * 2**20  # largest request body
    client_stall_timeout_s: float = 30.0  # how long a client may leave sent bytes unread before it is disconnected
    drain_timeout_s: float = 30.0  # how long requests may take to finish at shutdown
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)  # by tenant
    admin_key: str | None = field(default=None, repr=False)  # for control calls
    worker_key: str | None = field(default=None, repr=False)  # a router's key; callers without a key are then refused
    log_format: LogFormat = "text"  # or json
    log_level: str = "INFO"  # DEBUG, INFO, WARNING, ERROR
    otlp_endpoint: str | None = None  # where traces are sent
    register: Registration | None = None  # router to register with

    def __post_init__(self) -> None:
        _check(self.replicas >= 1, "replicas must be at least 1")
        _check_origins(self.cors_origins)
        _check(self.max_queue >= 0, "max_queue must be at least 0")
        _check(self.client_stall_timeout_s > 0, "client_stall_timeout must be above 0")
        _check(self.drain_timeout_s >= 0, "drain_timeout must be at least 0")

    @property
    def most_choices(self) -> int:
        """The most choices in flight at once; requests beyond that are refused."""
        return self.engine.max_running * self.replicas + self.max_queue


POLICIES = (
    "cache_aware",
    "least_requests",
    "least_tokens",
    "power_of_two",
    "round_robin",
    "random",
    "session",
    "metrics",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    url: str  # http://HOST:PORT
    role: str = "mixed"  # mixed, prefill, decode
    key: str | None = field(default=None, repr=False)  # the key this worker requires, if not `worker_key`


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    workers: tuple[WorkerAddress, ...] = ()  # initial workers; others may join later
    workers_file: Path | None = None  # lines of `URL [role]`, read again when it changes
    host: str = "127.0.0.1"  # address to bind
    tls: TlsFiles | None = None  # serve HTTPS with this certificate; None: HTTP
    worker_tls: TlsFiles = SYSTEM_CAS  # for workers with https://
    cors_origins: tuple[str, ...] = ()  # web pages that browsers let call the API: http://HOST:PORT, or *
    policy: str = "cache_aware"  # placement policy for mixed workers
    prefill_policy: str = "cache_aware"  # placement policy for prefill workers
    decode_policy: str = "least_tokens"  # placement policy for decode workers
    index_nodes: int = 1_000_000  # size of the prefix index
    max_in_flight: int | None = None  # requests at once; None: the workers' capacity
    max_queue: int = 1024  # requests that may wait beyond those
    max_body_bytes: int = 32 * 2**20  # largest request body
    retries: int = 3  # consecutive attempts without a token, beyond the first
    preempt_retry_count: int = 3  # how often a preempted answer may move to another worker
    preempt_retry_exclude_decode: bool = True  # do not move it back to the worker that preempted it
    patience_s: float = 30.0  # how long to wait for a worker when none is ready
    connect_timeout_s: float = 2.0  # how long connecting to a worker may take
    first_byte_timeout_s: float = 600.0  # how long a worker without keep-alives may take to send its first byte
    idle_timeout_s: float = 60.0  # longest time between two bytes of a stream
    client_stall_timeout_s: float = 30.0  # how long a client may leave sent bytes unread before it is disconnected
    probe_interval_s: float = 1.0  # time between two probes of a worker
    probe_timeout_s: float = 2.0  # how long a worker may take to answer a probe
    silence_s: float = 10.0  # how long a worker may send nothing before its answers are resumed elsewhere
    control_timeout_s: float = 30.0  # how long a worker may take to answer a control call
    ticket_timeout_s: float = 10.0  # how long a prefill worker may take to return a ticket for its KV
    disaggregate_tokens: int = 256  # prompts with fewer uncached tokens are computed by the decode worker
    drain_timeout_s: float = 30.0  # how long requests may take to finish at shutdown
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)  # by tenant
    admin_key: str | None = field(default=None, repr=False)  # for control calls
    worker_key: str | None = field(default=None, repr=False)  # the admin key of our workers
    log_format: LogFormat = "text"  # or json
    log_level: str = "INFO"  # DEBUG, INFO, WARNING, ERROR

    def __post_init__(self) -> None:
        _check_origins(self.cors_origins)
        for name in ("policy", "prefill_policy", "decode_policy"):
            value = getattr(self, name)
            _check(value in POLICIES, f"{name} must be one of {', '.join(POLICIES)}, not {value!r}")
        _check(self.max_in_flight is None or self.max_in_flight >= 1, "max_in_flight must be at least 1")
        for name in ("max_queue", "retries", "preempt_retry_count", "patience_s", "drain_timeout_s"):
            _check(getattr(self, name) >= 0, f"{name} must be at least 0")
        _check(self.disaggregate_tokens >= 0, "disaggregate_tokens must be at least 0")
        _check(self.ticket_timeout_s > 0, "ticket_timeout_s must be above 0")
        for name in ("connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s", "client_stall_timeout_s"):
            _check(getattr(self, name) > 0, f"{name} must be above 0")
        for name in ("probe_interval_s", "silence_s"):
            _check(getattr(self, name) > 0, f"{name} must be above 0")
