"""Attacks by a single client must not block the board or the agent for other clients."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.agents import few_files, start_process, stop_process
from support.over_grpc import Stub, channel_of, metadata_of, stub_of
from support.slow import slow_except
from support.waiting import eventually

from hil import errors
from hil.agent.admission import FIRST_MESSAGE_SECONDS, SILENT_CALLS
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.protocol import grpc_calls, wire
from hil.protocol.v1 import agent_pb2 as pb

MANY = 60
# Each operation takes milliseconds; the limit allows for a busy machine.
SOON_S = 8.0
X = np.arange(4096, dtype=np.float32)


class Board:
    """Inspect the process of an agent."""

    def __init__(self, process: Any, address: str, store: Path) -> None:
        self.process, self.address, self.store = process, address, store

    @property
    def memory(self) -> int:
        """Resident memory in bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
        raise AssertionError("the agent is gone")

    @property
    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))


@pytest.fixture(params=["hil.agent", pytest.param("hil.sim", marks=pytest.mark.slow)])
def module(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Board]]:
    """Return a function that starts an agent with the store ``store``."""
    with contextlib.ExitStack() as started:

        def make(module: str, *more: str) -> Board:
            store = tmp_path / "store"
            process, address = start_process(module, f"unix:{tmp_path}/a.sock", store, *more)
            started.callback(stop_process, process)
            return Board(process, address, store)

        yield make


@pytest.fixture
def board(start: Callable[..., Board], module: str) -> Board:
    found = start(module)
    with client_of(found) as client:
        client.describe(timeout=60)  # imports the runtimes
    return found


@contextlib.contextmanager
def client_of(board: Board) -> Iterator[AgentClient]:
    client = AgentClient(AgentEndpoint(board.address), "attacked")
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def raw_of(board: Board) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(board.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def silence() -> Iterator[Any]:
    """Simulate a client that sends nothing and stays connected."""
    threading.Event().wait(600)
    yield b""


def silent(channel: grpc.Channel, path: str, many: int, metadata: Any = ()) -> list[Any]:
    """Begin calls that never send a message."""
    return [channel.stream_stream(path)(silence(), metadata=metadata) for _ in range(many)]


def hold(stub: Any, opening: pb.SessionOpen) -> tuple[Any, queue.SimpleQueue[Any]]:
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    said.put(pb.HoldRequest(open=opening))
    return stub.Hold(iter(said.get, None)), said


def assert_everybody_gets_in(board: Board, fence: int) -> None:
    """Check that Describe, Clock, Health and a takeover finish soon."""
    begun = time.monotonic()
    with raw_of(board) as channel:
        stub = Stub(channel)
        stub.Describe(pb.DescribeRequest(), timeout=SOON_S)
        pongs = stub.Clock(iter([pb.ClockPing()] * 3), timeout=SOON_S)
        assert len(list(pongs)) == 3
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=SOON_S).status == 1
        replies, said = hold(stub, pb.SessionOpen(owner="next", fence=fence, ttl_s=60))
        assert next(replies).opened.fence == fence
        said.put(pb.HoldRequest(keep_alive=pb.KeepAlive()))
        assert next(replies).WhichOneof("kind") == "alive"
        said.put(None)
        assert next(replies).WhichOneof("kind") == "over"
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize(
    "path",
    [
        "/hil.v1.Sessions/Hold",
        "/hil.v1.Board/Clock",
        "/hil.v1.Board/Describe",
        "/hil.v1.Blobs/Missing",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_agent_serves_clients_despite_silent_calls(start, path):
    board = start("hil.agent")
    with client_of(board) as client:
        client.describe(timeout=60)
    with raw_of(board) as channel:
        begun = time.monotonic()
        kept = silent(channel, path, MANY)  # keep references: gRPC cancels unreferenced calls
        time.sleep(0.5)
        assert_everybody_gets_in(board, fence=5)
        # The latest admitted calls still wait for their first message. Admission order may differ from start order.
        late = time.monotonic() - begun > FIRST_MESSAGE_SECONDS - 1
        assert late or not all(call.done() for call in kept) or path.endswith("Missing")


@pytest.mark.slow
def test_agent_serves_clients_despite_idle_clock_streams(board):
    with raw_of(board) as channel:
        clock = channel.stream_stream("/hil.v1.Board/Clock")
        ticking = [clock(itertools.chain([b""], silence())) for _ in range(MANY)]
        health = health_pb2_grpc.HealthStub(channel)
        watched = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(MANY)]
        assert next(watched[-1]).status == 1
        assert next(ticking[-1])
        time.sleep(0.5)
        assert_everybody_gets_in(board, fence=5)


@pytest.mark.slow
def test_agent_ends_silent_call_and_frees_thread(start):
    board = start("hil.agent")
    with raw_of(board) as channel:
        call = channel.stream_stream("/hil.v1.Sessions/Hold")(silence())
        began = channel.stream_stream("/hil.v1.Board/Clock")(itertools.chain([b""], silence()))
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
        assert refused.value.code() is grpc.StatusCode.CANCELLED
        next(began)
        with pytest.raises(grpc.RpcError):
            next(began)


@pytest.fixture
def hung(start, module, add_programs) -> Iterator[tuple[Board, AgentClient, str]]:
    """Open a session with a program that never answers its first call."""
    board = start("hil.sim", "--fault", "hang") if module == "hil.sim" else start(module)
    with client_of(board) as client:
        client.describe(timeout=60)
        client.open_session("hung", fence=3, ttl_s=60, wait_s=5, on_wait=print)
        add = add_programs["onnxruntime"]
        add.push(client)
        yield board, client, add.load(client).program_id


def invoking(client: AgentClient, program: str, iterations: int) -> list[Any]:
    """Begin many calls of a program that never ends."""
    start = pb.InvokeStart(program_id=program, iterations=iterations, timeout_s=600)
    for name in ("a", "b"):
        start.inputs.append(wire.encode_tensor(name, "float32", X.shape, memoryview(X).cast("B"))[0])
    message = pb.InvokeRequest(start=start)
    return [
        stub_of(client).Invoke(itertools.chain([message], silence()), metadata=metadata_of(client)) for _ in range(MANY)
    ]


def test_agent_serves_clients_while_program_hangs(hung):
    board, client, program = hung
    before = board.threads
    calls = invoking(client, program, 1_000_000)
    puts = silent(channel_of(client), "/hil.v1.Blobs/Put", MANY, metadata_of(client))
    # The agent rejects calls over the limit and continues the admitted calls.
    refused = eventually(lambda: [call for call in calls if call.done()], within_s=SOON_S)
    assert {code_of(call) for call in refused} == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "BoardBusy")}
    assert_everybody_gets_in(board, fence=4)
    calls += puts
    eventually(lambda: all(call.done() for call in calls), within_s=30)
    # The next session can use the board.
    with client_of(board) as other:
        other.open_session("next", fence=9, wait_s=5, on_wait=print)
        assert other.missing(["blake3:" + "0" * 64])
    assert board.threads < before + 150


@pytest.mark.slow
def test_agent_frees_threads_of_cancelled_calls(hung):
    _, client, program = hung
    for _ in range(4):
        for call in invoking(client, program, 1_000_000):
            call.cancel()
    deadline = time.monotonic() + 15
    while True:
        try:
            assert client.missing([]) == {}
            break
        except errors.BoardBusy:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    error = grpc_calls.decode_error(call)
    return call.code(), type(error).__name__


@pytest.mark.slow
def test_waiting_clients_do_not_block_takeover(board):
    with client_of(board) as holder, raw_of(board) as channel:
        holder.open_session("holder", ttl_s=60, wait_s=5, on_wait=print)
        stub = Stub(channel)
        waiting = [hold(stub, pb.SessionOpen(owner="waits", wait_s=math.inf))[0] for _ in range(8)]
        for one in waiting:
            assert next(one).WhichOneof("kind") == "waiting"
        assert_everybody_gets_in(board, fence=50)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def deaf_call(board: Board, path: str, message: bytes) -> socket.socket:
    """Begin a plain HTTP/2 call whose client has no receive window and reads no response."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers",
              "content-type": "application/grpc"}  # fmt: skip
    headers = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(board.address.removeprefix("unix:"))
    no_room = b"\0\4" + bytes(4)  # SETTINGS_INITIAL_WINDOW_SIZE = 0
    connection.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, no_room)
        + frame(1, 4, 1, headers)
        + frame(0, 0, 1, b"\0" + len(message).to_bytes(4, "big") + message)
    )
    return connection


@pytest.mark.slow
def test_agent_frees_threads_of_deaf_owners(start):
    """Take the session repeatedly from owners without room for a response."""
    board = start("hil.agent")
    with raw_of(board) as channel, contextlib.ExitStack() as kept:
        stub = Stub(channel)
        for fence in range(1, MANY + 1):
            opening = pb.HoldRequest(open=pb.SessionOpen(owner="x", fence=fence, ttl_s=3600))
            kept.enter_context(deaf_call(board, "/hil.v1.Sessions/Hold", opening.SerializeToString()))
            eventually(lambda fence=fence: stub.Describe(pb.DescribeRequest(), timeout=60).holder.fence >= fence)
        assert_everybody_gets_in(board, fence=100)


def data_call(board: Board, method: str, message: bytes = b"") -> socket.socket:
    """Begin a call on a data connection whose caller then neither sends nor reads."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{board.address.removeprefix('unix:')}.data")
    if method:
        called = pb.DataCall(method=method).SerializeToString()
        connection.sendall(b"\1" + len(called).to_bytes(4, "little") + called)
    if message:
        connection.sendall(b"\3" + len(message).to_bytes(4, "little") + message)
    return connection


@pytest.mark.parametrize("method", slow_except(["", "Describe", "Clock", "Hold"], 0))
def test_agent_serves_clients_despite_silent_data_connections(board, method):
    with contextlib.ExitStack() as kept:
        silent = [kept.enter_context(data_call(board, method)) for _ in range(MANY)]
        # Each connection received READY or was closed to admit others.
        eventually(lambda: len(select.select(silent, [], [], 0)[0]) >= MANY - SILENT_CALLS)
        assert_everybody_gets_in(board, fence=70)
        begun = time.monotonic()
        with client_of(board) as client:
            client.describe(timeout=SOON_S)
            client.open_session("next", fence=71, wait_s=SOON_S, on_wait=print)
            assert len(client.pings(3)) == 3
        assert time.monotonic() - begun < SOON_S


@pytest.mark.slow
def test_agent_frees_threads_of_deaf_data_owners(board):
    before = board.threads
    with contextlib.ExitStack() as kept, client_of(board) as client:
        for fence in range(1, MANY + 1):
            opening = pb.HoldRequest(open=pb.SessionOpen(owner="x", fence=fence, ttl_s=3600))
            kept.enter_context(data_call(board, "Hold", opening.SerializeToString()))
            eventually(lambda fence=fence: client.describe(timeout=60).holder.fence >= fence)
        assert_everybody_gets_in(board, fence=100)
        eventually(lambda: board.threads <= before + 16)


def test_agent_rejects_large_message_without_memory_growth(board):
    before = board.memory
    with raw_of(board) as channel:
        for path, size in (("/hil.v1.Board/Describe", 512 << 20), ("/hil.v1.Sessions/Hold", 64 << 20)):
            with pytest.raises(grpc.RpcError) as refused:
                next(channel.stream_stream(path)(iter([b"\x0a" + bytes(size)]), timeout=120))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for path in ("/hil.v1.Board/Describe", "/hil.v1.Board/Clock", "/hil.v1.Sessions/Hold"):
            with pytest.raises(grpc.RpcError) as refused:
                next(channel.stream_stream(path)(iter([bytes(3 << 20)]), timeout=30))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, path
    assert board.memory < before + (40 << 20)


def test_agent_limits_inline_tensor_size(board, add_programs):
    with client_of(board) as client:
        client.open_session("inline", wait_s=5, on_wait=print)
        add = add_programs["onnxruntime"]
        add.push(client)
        program = add.load(client).program_id
        before = board.memory
        for size, code in ((wire.INLINE_MAX + 1, grpc.StatusCode.INVALID_ARGUMENT),
                           (64 << 20, grpc.StatusCode.RESOURCE_EXHAUSTED)):  # fmt: skip
            start = pb.InvokeStart(program_id=program, iterations=1)
            start.inputs.append(pb.Tensor(name="a", dtype="uint8", shape=[size], inline=bytes(size)))
            with pytest.raises(grpc.RpcError) as refused:
                next(stub_of(client).Invoke(iter([pb.InvokeRequest(start=start)]), metadata=metadata_of(client)))
            assert refused.value.code() is code
        assert board.memory < before + (40 << 20)
        np.testing.assert_array_equal(client.invoke(program, {"a": X, "b": X}).outputs["sum"], X + X)


@pytest.mark.slow
def test_client_streams_many_small_tensors_above_message_limit(board, tmp_path):
    import onnx
    from onnx import TensorProto, helper

    from hil.core.files import digest_file

    names = [f"x{number}" for number in range(12)]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in names]
    outputs = [helper.make_tensor_value_info(f"y{name}", TensorProto.FLOAT, ["n"]) for name in names]
    nodes = [helper.make_node("Neg", [name], [f"y{name}"]) for name in names]
    graph = helper.make_graph(nodes, "neg", inputs, outputs)
    path = tmp_path / "neg.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    digest = digest_file(path)
    given = {name: np.full(250_000, number, np.float32) for number, name in enumerate(names)}
    with client_of(board) as client:
        client.open_session("many", wait_s=5, on_wait=print)
        client.put({digest: (path, 0)})
        program = client.load(
            {"neg.onnx": digest}, "neg.onnx", runtime="onnxruntime", device="", function="", timeout=120
        ).program_id
        found = client.invoke(program, given).outputs
    for name, array in given.items():
        np.testing.assert_array_equal(found[f"y{name}"], -array)


METHODS = {
    "Board": ["Describe", "Clock", "Logs", "Counters"],
    "Sessions": ["Hold"],
    "Blobs": ["Missing", "Put", "Get"],
    "Programs": ["Load", "Invoke", "Unload"],
}


def test_agent_reports_undecodable_bytes_as_invalid_argument(board):
    with client_of(board) as client, raw_of(board) as channel:
        client.open_session("undecodable", ttl_s=600, wait_s=5, on_wait=print)
        for path in (f"/hil.v1.{service}/{method}" for service, methods in METHODS.items() for method in methods):
            call = channel.stream_stream(path)
            with pytest.raises(grpc.RpcError) as refused:
                list(call(iter([b"\x0a\xff\xff\xff\xff\x7f"]), timeout=SOON_S, metadata=metadata_of(client)))
            assert (path, *code_of(refused.value)) == (path, grpc.StatusCode.INVALID_ARGUMENT, "UsageError")


def test_agent_rejects_undecodable_keep_alive(board):
    with raw_of(board) as channel:
        opening = pb.HoldRequest(open=pb.SessionOpen(owner="x")).SerializeToString()
        with pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream("/hil.v1.Sessions/Hold")(iter([opening, b"\xff\xff"]), timeout=SOON_S))
        assert code_of(refused.value) == (grpc.StatusCode.INVALID_ARGUMENT, "UsageError")


def test_agent_rejects_invalid_session_times(board):
    with raw_of(board) as channel:
        stub = Stub(channel)
        for numbers in ({"ttl_s": math.nan}, {"ttl_s": -1}, {"wait_s": math.nan}, {"wait_s": -1}):
            with pytest.raises(grpc.RpcError) as refused:
                next(hold(stub, pb.SessionOpen(owner="x", **numbers))[0])
            assert code_of(refused.value) == (grpc.StatusCode.INVALID_ARGUMENT, "UsageError")


@pytest.mark.parametrize("limit", [math.nan, -1.0])
def test_agent_rejects_invalid_timeout(board, add_programs, limit):
    with client_of(board) as client:
        client.open_session("limits", wait_s=5, on_wait=print)
        add = add_programs["onnxruntime"]
        add.push(client)
        files = [pb.ProgramFile(name=name, digest=digest) for name, digest in add.digests.items()]
        request = pb.LoadRequest(files=files, main=add.path.name, runtime=add.runtime, timeout_s=limit)
        with pytest.raises(grpc.RpcError) as refused:
            stub_of(client).Load(request, timeout=60, metadata=metadata_of(client))
        assert code_of(refused.value) == (grpc.StatusCode.INVALID_ARGUMENT, "UsageError")
        program = add.load(client).program_id
        start = pb.InvokeStart(program_id=program, iterations=1, timeout_s=limit)
        with pytest.raises(grpc.RpcError) as refused:
            next(stub_of(client).Invoke(iter([pb.InvokeRequest(start=start)]), metadata=metadata_of(client)))
        assert code_of(refused.value) == (grpc.StatusCode.INVALID_ARGUMENT, "UsageError")


def test_agent_serves_clients_despite_many_connections(start):
    with few_files():
        board = start("hil.agent")
    with client_of(board) as client:
        client.describe(timeout=60)
    before = board.memory
    path = board.address.removeprefix("unix:")
    with contextlib.ExitStack() as kept:
        for _ in range(800):
            one = kept.enter_context(socket.socket(socket.AF_UNIX))
            one.settimeout(10)
            one.connect(path)
        assert_everybody_gets_in(board, fence=5)
        assert board.memory < before + (40 << 20)


def test_agent_rejects_excessive_fences(start, module):
    board = start(module)
    with raw_of(board) as channel:
        stub = Stub(channel)
        for fence in (2**64 - 1, 2**63, 2**62 - 1, 2**40):
            with pytest.raises(grpc.RpcError) as refused:
                next(hold(stub, pb.SessionOpen(owner="x", fence=fence))[0])
            assert code_of(refused.value) == (grpc.StatusCode.INVALID_ARGUMENT, "UsageError")
        assert stub.Describe(pb.DescribeRequest(), timeout=60).fence == 0
    assert_everybody_gets_in(board, fence=5)


@pytest.mark.slow
@pytest.mark.parametrize("content", [str(2**64 - 1), "", "what a dying card left"])
def test_agent_reports_damaged_fence_until_reset(start, hil, tmp_path, content):
    store = tmp_path / "store"
    store.mkdir()
    (store / "fence").write_text(content)
    board = start("hil.agent")
    with client_of(board) as client:
        for call in (
            lambda: client.describe(timeout=60),
            lambda: client.open_session("x", wait_s=1, on_wait=print),
            lambda: client.open_session("x", fence=9, wait_s=1, on_wait=print),
        ):
            with pytest.raises(errors.BoardError, match=r"fence.*is corrupt") as told:
                call()
            assert "hil board reset-fence" in told.value.hint
    run = hil("board", "info", board.address)
    assert run.code == 4 and "hil board reset-fence" in run.err
    asked = hil("board", "reset-fence", board.address)
    assert asked.code == 2 and "--store" in asked.err
    running = hil("board", "reset-fence", "--store", str(store))
    assert running.code == 4 and "stop the agent first" in running.err
    assert (store / "fence").read_text() == content
    stop_process(board.process)
    done = hil("board", "reset-fence", "--store", str(store), "--json")
    assert done.document == {"schema": 1, "board": str(store), "fence": 0}
    assert hil("board", "reset-fence", "--store", str(tmp_path)).code == 2
    again = start("hil.agent")
    assert_everybody_gets_in(again, fence=1)


def test_agent_rejects_announced_sizes_before_allocation(board, add_programs):
    """The agent rejects impossible sizes, and the sum over many programs, before it allocates memory."""
    with client_of(board) as client:
        client.open_session("announces", wait_s=5, on_wait=print)
        add = add_programs["onnxruntime"]
        add.push(client)
        programs = [add.load(client).program_id for _ in range(2)]
        machine = client.describe()
        most = machine.memory_limit_bytes or machine.machine.memory_bytes
        before = board.memory

        def announce(program: str, size: int) -> Any:
            start = pb.InvokeStart(program_id=program, iterations=1)
            start.inputs.append(pb.Tensor(name="a", dtype="uint8", shape=[size], streamed=size))
            messages = itertools.chain([pb.InvokeRequest(start=start)], silence())
            return stub_of(client).Invoke(messages, metadata=metadata_of(client))

        for size in (2**63, most + 1):
            with pytest.raises(grpc.RpcError) as refused:
                next(announce(programs[0], size))
            assert grpc_calls.decode_error(refused.value).message.startswith("the inputs need")
        kept = announce(programs[0], most * 2 // 3)
        time.sleep(1)
        with pytest.raises(grpc.RpcError) as refused:
            next(announce(programs[1], most * 2 // 3))
        assert "in addition to" in grpc_calls.decode_error(refused.value).message
        assert not kept.done() and board.memory < before + (40 << 20)


def test_blob_query_limits_number_of_digests(start):
    board = start("hil.sim")
    with client_of(board) as client:
        client.open_session("many", wait_s=60, on_wait=print)
        with pytest.raises(errors.ProtocolBroken, match="maximum 20000"):
            client.missing(["blake3:" + "0" * 64] * 20_001)
        with pytest.raises(errors.ProtocolBroken, match="maximum 20000"):
            client.missing(["blake3:" + "0" * 64] * 50_000)
