"""The agent as a gRPC server: where it may listen, who may call, and its life from start to stop."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hil.agent import runtimes
from hil.agent.admission import THREADS, Admission
from hil.agent.journal import Journal
from hil.agent.lock import StoreLock
from hil.agent.policy import Policy
from hil.agent.programs import Programs
from hil.agent.service import BlobService, BoardService, ProgramService, SessionService
from hil.agent.session import Sessions
from hil.agent.store import BlobStore
from hil.agent.supervisor import Supervisor
from hil.errors import SessionEnded, UsageError
from hil.protocol import wire
from hil.protocol.listening import HANDSHAKE, check_listen, listen_on

_OPTIONS = {
    **dict((*wire.GRPC_OPTIONS, HANDSHAKE)),
    "grpc.so_reuseport": 0,
    # Refused by its length, before any of it is read.
    "grpc.max_receive_message_length": wire.MESSAGE_MAX,
    "grpc.max_concurrent_streams": 128,
}


@dataclass(frozen=True)
class AgentConfig:
    """How an agent runs.

    Attributes:
        listen: ``unix:PATH`` or ``HOST:PORT`` (port 0: any free one).
        store: folder of blobs, programs, the fence and the journal.
        name: what the device is called.
        build: what was deployed, for Describe.
        quota_bytes: most that blobs may take; 0 is no limit.
        memory_limit: most that a program may take, in bytes; 0 is the machine's own.
        token: what callers must present as ``authorization: Bearer``; needed beyond loopback.
        tls_key, tls_cert: the server's, PEM files; needed beyond loopback.
        tls_client_ca: with it, clients must show a certificate of this authority (mutual TLS).
        trusted_keys: with them, only programs of bundles that one of these ed25519 keys has signed are loaded.
        runtimes: name -> ``module:Class``.
        runtime_options: handed to every runtime in its worker.
        simulated: what of this board is simulated, for Describe.
        make_store: makes the blob store.
    """

    listen: str
    store: Path
    name: str = ""
    build: str = ""
    quota_bytes: int = 0
    memory_limit: int = 0
    token: str = ""
    tls_key: Path | None = None
    tls_cert: Path | None = None
    tls_client_ca: Path | None = None
    trusted_keys: tuple[bytes, ...] = ()
    runtimes: dict[str, str] = field(default_factory=runtimes.known)
    runtime_options: dict[str, Any] = field(default_factory=dict)
    simulated: list[str] = field(default_factory=list)
    make_store: Callable[[Path, int], BlobStore] = BlobStore


class Agent:
    """A running agent. ``address`` is where it really listens."""

    def __init__(self, config: AgentConfig) -> None:
        check_listen(
            config.listen,
            protected=bool(config.tls_key and config.tls_cert and config.token),
            needs="TLS and a token",
            hint="--tls-cert, --tls-key and --token-file",
        )
        # Before anything in the store is touched: it may be another agent's.
        self._store_lock = StoreLock(config.store)
        try:
            self._serve(config)
        except BaseException:
            self._store_lock.release()
            raise

    def _serve(self, config: AgentConfig) -> None:
        try:
            store = config.make_store(config.store, config.quota_bytes)
        except OSError as error:
            raise UsageError(f"the store {config.store} cannot be used: {error.strerror}") from error
        self._supervisor = Supervisor(config.runtimes, config.runtime_options, config.memory_limit)
        self._sessions = Sessions(config.store / "fence", self._session_over, Journal(config.store / "journal.jsonl"))
        policy = Policy(config.trusted_keys) if config.trusted_keys else None
        self._programs = Programs(store, self._supervisor, self._sessions, config.memory_limit, policy)
        admission = Admission(self._sessions)
        interceptors: list[grpc.ServerInterceptor] = [_TokenCheck(config.token)] if config.token else []
        interceptors.append(admission)
        # Threads are made as they are needed; admission sees to it that there is always one.
        pool = futures.ThreadPoolExecutor(THREADS, thread_name_prefix="rpc")
        self._server = grpc.server(pool, interceptors=interceptors, options=tuple(_OPTIONS.items()))
        name = config.name or os.uname().nodename
        servicers = {
            "Board": BoardService(
                name,
                self._supervisor,
                self._sessions,
                self._programs,
                config.memory_limit,
                config.simulated,
                config.build,
            ),
            "Sessions": SessionService(self._sessions, admission.goodbyes),
            "Blobs": BlobService(store, self._sessions),
            "Programs": ProgramService(self._programs, self._sessions),
        }
        self._server.add_generic_rpc_handlers([wire.handlers(*item) for item in servicers.items()])
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [f"{wire.PACKAGE}.{service}" for service in wire.SERVICES]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self.address = listen_on(
            self._server, config.listen, cert=config.tls_cert, key=config.tls_key, client_ca=config.tls_client_ca
        )
        self._server.start()
        for service in ("", *names):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def wait(self) -> None:
        """Serve until stopped."""
        self._server.wait_for_termination()

    def idle_s(self) -> float:
        """For how many seconds no session has been open."""
        return self._sessions.idle_s()

    def rest(self) -> None:
        """End what is kept ready for the next program, while nobody has the device."""
        self._sessions.while_free(self._supervisor.rest)
        # What importing and past work have left free is given back, where the C library can.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    def stop(self) -> None:
        """Stop serving and end every worker."""
        self._health.enter_graceful_shutdown()
        # A call that its client broke off may never be counted as ended by gRPC: do not wait for it for ever.
        self._server.stop(grace=0.2).wait(2.0)
        self._programs.unload_all(SessionEnded("the agent was stopped"))
        self._supervisor.close()
        self._store_lock.release()

    def _session_over(self) -> None:
        self._programs.unload_all(SessionEnded("the session that ran this program has ended"))


class _TokenCheck(grpc.ServerInterceptor):
    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}"
        self._missing = _refusal("this agent asks for a token, and none was given")
        self._wrong = _refusal("the token that was given is not this agent's")

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        given = str(dict(details.invocation_metadata).get("authorization", ""))
        if hmac.compare_digest(given.encode(), self._wanted.encode()):
            return continuation(details)
        return self._wrong if given else self._missing


def _refusal(words: str) -> Any:
    def refuse(_: Any, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, words)

    return grpc.stream_stream_rpc_method_handler(refuse)
