"""No request crashes the agent or writes outside its store."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.over_grpc import metadata_of, stub_of

from hil.protocol import wire, wire_errors
from hil.protocol.v1 import agent_pb2 as pb

MESSAGES = 700

# Paths that try to escape, invalid digests, and a valid digest.
paths = st.sampled_from(
    ["../../x", "/etc/passwd", "a/../../b", "..", ".", "", "a\0b", "x" * 300, "C:\\x", "blobs/../../y", "\u202e", "ok"]
)
digests = st.one_of(
    st.sampled_from(
        ["blake3:" + "0" * 64, "sha256:" + "f" * 64, "blake3:../../../x", "md5:" + "0" * 32, "", "blake3:" + "A" * 64]
    ),
    st.text(max_size=80),
    paths,
)
texts = st.one_of(st.text(max_size=40), paths, st.sampled_from(["iree", "onnxruntime", "local-task", "main"]))
numbers = st.one_of(st.integers(0, 100), st.sampled_from([2**31, 2**40, 2**63 - 1]))
floats = st.one_of(st.floats(0, 1), st.sampled_from([float("nan"), float("inf"), -1.0, 1e300]))
dtypes = st.sampled_from(["float32", "int4", "string", "object", "nonsense", "", "V8", "O"])

tensors = st.builds(
    lambda name, dtype, shape, inline, streamed, blob, kind: pb.Tensor(
        name=name, dtype=dtype, shape=shape, **{kind: {"inline": inline, "streamed": streamed, "blob": blob}[kind]}
    ),
    texts, dtypes, st.lists(numbers, max_size=4), st.binary(max_size=64), numbers, digests,
    st.sampled_from(["inline", "streamed", "blob"]),
)  # fmt: skip
files = st.builds(lambda name, digest: pb.ProgramFile(name=name, digest=digest), paths, digests)
raw = st.binary(max_size=200)

unary = {
    "Describe": st.just(pb.DescribeRequest()),
    "Missing": st.builds(lambda many: pb.MissingRequest(digests=many), st.lists(digests, max_size=5)),
    "Load": st.builds(
        lambda many, main, runtime, device, function, limit: pb.LoadRequest(
            files=many, main=main, runtime=runtime, device=device, function=function, timeout_s=limit
        ),
        st.lists(files, max_size=4), paths, texts, texts, texts, floats,
    ),
    "Unload": st.builds(lambda name: pb.UnloadRequest(program_id=name), texts),
}  # fmt: skip
streams = {
    "Put": st.one_of(
        st.builds(
            lambda digest, size, offset: pb.PutRequest(start=pb.PutStart(digest=digest, size=size, offset=offset)),
            digests, numbers, numbers,
        ),
        st.builds(lambda data: pb.PutRequest(data=data), raw),
    ),
    "Invoke": st.one_of(
        st.builds(
            lambda name, many, warmup, iterations, limit, profile: pb.InvokeRequest(
                start=pb.InvokeStart(
                    program_id=name, inputs=many, warmup=warmup % 2**32, iterations=iterations % 2**32, timeout_s=limit,
                    profile=profile,
                )
            ),
            st.one_of(texts, st.just("PROGRAM")), st.lists(tensors, max_size=3), numbers, st.integers(0, 3), floats,
            st.one_of(st.none(), st.builds(lambda tool: pb.ProfilePass(tool=tool), digests)),
        ),
        st.builds(lambda data: pb.InvokeRequest(data=data), raw),
        st.builds(lambda many: pb.InvokeRequest(digests=pb.Digests(digests=many)), st.lists(digests, max_size=3)),
    ),
    "Hold": st.one_of(
        st.builds(
            lambda owner, ttl, fence: pb.HoldRequest(open=pb.SessionOpen(owner=owner, ttl_s=ttl, fence=fence)),
            texts, floats, st.just(0),
        ),
        st.just(pb.HoldRequest(keep_alive=pb.KeepAlive())),
        st.just(pb.HoldRequest()),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def victim(tmp_path_factory, add_programs):
    """Start an agent with a session and a loaded program; return them with the directory around its store."""
    from support.agents import start_process, stop_process

    from hil.controller.devices.agent_client.client import AgentClient
    from hil.controller.devices.board_client import AgentEndpoint

    folder = tmp_path_factory.mktemp("fuzz")
    process, address = start_process("hil.agent", f"unix:{folder}/a.sock", folder / "store")
    client = AgentClient(AgentEndpoint(address), "fuzz")
    client.open_session("fuzz", wait_s=60, on_wait=print)
    add = add_programs["onnxruntime"]
    add.push(client)
    yield process, address, client, add.load(client).program_id, folder
    client.close()
    stop_process(process)


def outside(folder: Path) -> set[str]:
    """List files around the store, which must not change."""
    return {str(path) for place in (folder, folder.parent, Path("/etc")) for path in place.iterdir()}


def survives(victim, method: str, messages: list[object]) -> None:
    process, _, client, program, folder = victim
    before = outside(folder)
    stub = getattr(stub_of(client), method)
    for message in messages:
        start = getattr(message, "start", None)
        if getattr(start, "program_id", "") == "PROGRAM":
            start.program_id = program
    sent = messages[0] if method in unary else iter(messages)
    try:
        reply = stub(sent, timeout=3, metadata=metadata_of(client))
        if method not in unary:
            for number, _ in enumerate(reply):
                if number > 20:
                    reply.cancel()
    except grpc.RpcError as error:
        # The agent rejects the request cleanly.
        said = dict(error.trailing_metadata() or ()).get(wire_errors.ERROR_KEY)
        if said:
            assert pb.Error.FromString(said).kind != "BoardLost", pb.Error.FromString(said)
        assert error.code() is not grpc.StatusCode.UNKNOWN, error
    assert process.poll() is None
    assert outside(folder) == before


fuzzed = settings(
    max_examples=MESSAGES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(unary))
def test_agent_survives_fuzzed_unary_requests(victim, method):
    @fuzzed
    @given(unary[method])
    def fuzz(message: object) -> None:
        survives(victim, method, [message])

    fuzz()


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(streams))
def test_agent_survives_fuzzed_streams(victim, method):
    @fuzzed
    @given(st.lists(streams[method], min_size=1, max_size=6))
    def fuzz(messages: list[object]) -> None:
        survives(victim, method, messages)

    fuzz()


@pytest.mark.parametrize("method", ["Describe", "Missing", "Put", "Load", "Invoke", "Hold"])
def test_agent_survives_random_bytes(victim, method):
    service = next(name for name in wire.SERVICES if method in dir_of(name))

    @settings(fuzzed, max_examples=200)
    @given(raw)
    def fuzz(data: bytes) -> None:
        process, address, client, _, _ = victim
        with grpc.insecure_channel(address) as channel:
            call = channel.stream_stream(f"/hil.v1.{service}/{method}")
            try:
                for number, _ in enumerate(call(iter([data]), timeout=3, metadata=metadata_of(client))):
                    if number > 20:
                        break
            except grpc.RpcError as error:
                assert error.code() is not grpc.StatusCode.UNKNOWN, error
        assert process.poll() is None

    fuzz()


def dir_of(service: str) -> set[str]:
    return {method.name for method in pb.DESCRIPTOR.services_by_name[service].methods}


def test_agent_runs_programs_after_fuzzing(victim, add_programs):
    import numpy as np

    _, _, client, _, _ = victim
    # Load again: a fuzzed call may have ended the program with a short timeout.
    program = add_programs["onnxruntime"].load(client).program_id
    a = np.ones(4096, np.float32)
    np.testing.assert_array_equal(client.invoke(program, {"a": a, "b": a}).outputs["sum"], a + a)
