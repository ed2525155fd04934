"""Every error keeps its type over a real gRPC channel, for any length and any bytes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.over_grpc import serve_all

from hil import errors
from hil.agent.server import BoardService
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.gateway.calls import HandlerFactory
from hil.controller.farm.gateway.metrics import Metrics
from hil.controller.farm.messages import Principal, Role
from hil.controller.farm.paths import FarmAddress
from hil.protocol import grpc_calls, wire_errors
from hil.protocol.v1 import agent_pb2 as pb

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.HilError) and kind is not errors.HilError
]
SIZES = (0, 1, 16 << 10, 1 << 20)
_SIZES = [pytest.param(size, marks=pytest.mark.slow if size == 1 else ()) for size in SIZES]
PARTS = ("message", "hint", "detail")
# Text repeated to fill a part: plain, four bytes per character, invalid UTF-8, and characters that gRPC escapes.
FILLS = {"ascii": "x", "wide": "\U0001f600", "no UTF-8": b"\xff\xfe".decode("utf-8", "surrogateescape"), "nul": "\0%\n"}


def filled(fill: str, size: int) -> str:
    return (fill * (size // len(fill) + 1))[:size]


def error_of(kind: type[errors.HilError], part: str, text: str) -> errors.HilError:
    return kind(**{"message": "what", "hint": "do", "detail": "tail", part: text})


class Failing(BoardService):
    """An agent's board service whose Describe fails with ``error``; Logs works."""

    def __init__(self) -> None:
        self.error: Exception = errors.BoardLost()
        self._sessions = SimpleNamespace(check=lambda token: None, find_session=lambda context: None)

    def Describe(self, request, context):  # noqa: N802 - the protocol's name
        raise self.error


@pytest.fixture(scope="module")
def agent() -> Iterator[tuple[Failing, AgentClient]]:
    servicer = Failing()
    server = grpc.server(
        futures.ThreadPoolExecutor(4), interceptors=[serve_all({"Board": servicer})], options=grpc_calls.GRPC_OPTIONS
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with contextlib.closing(AgentClient(AgentEndpoint(f"127.0.0.1:{port}"), "test")) as client:
        yield servicer, client
    server.stop(None).wait()


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[Any, FarmClient]]:
    """A gateway whose calls fail with ``error``."""

    class Servicer:
        error: Exception = errors.FarmError()

        async def fail(self, *_: object) -> None:
            raise self.error

        submit = ask = do = follow = lease = dial = fail

    class Everybody:
        async def authenticate(self, context: object) -> Principal:
            return Principal("anna", Role.ADMIN)

        async def record_refusal(self, *_: object) -> None:
            pass

    servicer, there = Servicer(), threading.Event()
    address = SimpleNamespace(port=0)

    async def serve() -> None:
        address.loop, address.over = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(options=grpc_calls.GRPC_OPTIONS)
        server.add_generic_rpc_handlers([HandlerFactory(Everybody(), Metrics()).make_handlers("Farm", servicer)])
        address.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        there.set()
        await address.over.wait()
        await server.stop(None)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert there.wait(30)
    with contextlib.closing(FarmClient(FarmAddress((f"127.0.0.1:{address.port}",), "t"), patience_s=0.0)) as client:
        yield servicer, client
    address.loop.call_soon_threadsafe(address.over.set)
    thread.join(30)


def told(client: AgentClient, stage: str = "run") -> errors.HilError:
    with pytest.raises(errors.HilError) as caught, client._translate_errors(stage):
        client._call_unary("Describe", pb.DescribeRequest(), 60)
    return caught.value


@pytest.mark.ci
@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_agent_error_arrives_complete_for_any_length(agent, kind, size):
    servicer, client = agent
    for part in PARTS:
        for fill in FILLS.values():
            servicer.error = error_of(kind, part, filled(fill, size))
            came = told(client)
            # A usage error of an agent becomes the stage's error: the user's input was checked before.
            usage = errors.RunFailed if kind is errors.UsageError else kind
            assert type(came) is (usage if kind in wire_errors.AGENT_KINDS else errors.BoardError)
            assert came.exit_code == type(came).exit_code
            wanted = getattr(servicer.error, part).encode("utf-8", "backslashreplace")
            if size == SIZES[-1]:  # parts have a size limit
                wanted = wanted[:500_000] if part != "detail" else wanted[-500_000:]
            assert wanted.decode(errors="ignore") in (getattr(came, part) + came.detail)
            if size < SIZES[2]:
                assert (came.message, came.hint, came.detail) == tuple(
                    getattr(servicer.error, one).encode("utf-8", "backslashreplace").decode() for one in PARTS
                )


@pytest.mark.ci
@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_gateway_error_arrives_with_type_for_any_length(gateway, kind, size):
    servicer, client = gateway
    for part in PARTS:
        for fill in FILLS.values():
            servicer.error = error_of(kind, part, filled(fill, size))
            with pytest.raises(errors.HilError) as caught:
                client.do("cancel", name="a job")
            assert type(caught.value) is kind
            assert size < SIZES[2] or "[cut: " in getattr(caught.value, part)


def test_wire_error_fits_with_all_parts_long(agent):
    servicer, client = agent
    for fill in FILLS.values():
        long = filled(fill, 1 << 20)
        servicer.error = errors.RunFailed(long, hint=long, detail=long)
        assert type(told(client)) is errors.RunFailed


def test_agent_failure_with_long_message_arrives(agent):
    servicer, client = agent
    servicer.error = RuntimeError("\udcff" * 100_000)
    came = told(client)
    assert type(came) is errors.BoardLost
    assert came.message.startswith("the agent failed: RuntimeError: \\udcff")
    assert "Traceback" in came.detail


def test_truncated_error_arrives_if_full_text_unavailable(agent, monkeypatch):
    servicer, client = agent
    servicer.error = errors.RunFailed("m" * 5000, detail="d" * 5000)
    monkeypatch.setattr(wire_errors.KeptErrors, "keep", lambda self, text: "none of ours")
    came = told(client)
    assert type(came) is errors.RunFailed
    assert came.message.endswith("[cut: 5000 bytes in all]")
    assert came.detail.startswith("[cut: 5000 bytes in all]\nddd")


def test_error_store_retains_last_long_errors():
    kept = wire_errors.KeptErrors()
    names = [kept.keep(b"%d" % number) for number in range(6)]
    assert ["".join(kept.iter_pieces(name)) for name in names] == ["", "", "2", "3", "4", "5"]
    assert not [*kept.iter_pieces(""), *kept.iter_pieces("é\udcff")]
    wide = "\U0001f600" * 100_000
    assert "".join(kept.iter_pieces(kept.keep(wide.encode()))) == wide


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        ("", errors.ProtocolBroken),
        ("push", errors.ProtocolBroken),
        ("load", errors.LoadFailed),
        ("run", errors.RunFailed),
    ],
)
def test_agent_usage_error_becomes_stage_error(agent, stage, kind):
    servicer, client = agent
    servicer.error = errors.UsageError("what you typed is wrong")
    assert type(told(client, stage)) is kind


@pytest.mark.parametrize(
    "kind", ["", "HilError", "Exception", "SystemExit", "ClassVar", "Any", "annotations", "__builtins__", "NoSuch"]
)
def test_unknown_error_kind_becomes_board_error(kind):
    assert type(wire_errors.make_error(kind, "x")) is errors.BoardError


class _Call(grpc.RpcError, grpc.Call):
    """A failed call with metadata from a hostile peer."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata

    def trailing_metadata(self) -> Any:
        return self._metadata


_Call.__abstractmethods__ = frozenset()


GARBAGE = (b"\xff\xff\xff", "text", b"\x0a\x02\xff\xfe")


@pytest.mark.parametrize(
    "metadata", [None, (), (("other", "x"),), *(((wire_errors.ERROR_KEY, value),) for value in GARBAGE)]
)
def test_typed_error_ignores_invalid_metadata(metadata):
    assert grpc_calls.decode_error(_Call(metadata)) is None
    assert grpc_calls.decode_error(grpc.RpcError()) is None


@pytest.mark.parametrize("kind", ["BoardLost", "BoardBusy", "HilError", "SessionEnded", "ReferenceFailed", "Any"])
def test_worker_cannot_report_board_errors(kind):
    came = wire_errors.make_error(kind, "x", among=wire_errors.WORKER_KINDS, otherwise=errors.LoadFailed)
    assert type(came) is errors.LoadFailed


def test_error_code_crosses_the_wire():
    sent = wire_errors.to_message(errors.RunCrashed("it died", code=errors.ErrorCode.ILLEGAL_INSTRUCTION))
    received = wire_errors.decode_error(sent.SerializeToString())
    assert received is not None and received.code is errors.ErrorCode.ILLEGAL_INSTRUCTION


def test_unknown_error_code_is_ignored():
    received = wire_errors.decode_error(pb.Error(kind="RunCrashed", message="m", code="new").SerializeToString())
    assert received is not None and received.code is errors.ErrorCode.NONE
