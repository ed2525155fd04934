"""The contract of every agent, over every connection."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import numpy as np
import pytest
from support.agents import compile_mlir, program
from support.step_programs import logits_of, save_summing_model, step_function

from hil import errors
from hil.controller.devices.agent_client.call import CallFailed
from hil.core import steps
from hil.core.clock import MAX_DRIFT, fit
from hil.core.digest import digest_of
from hil.core.steps import PromptFunction, StepRule, StepsPlan
from hil.protocol import wire_errors
from hil.protocol.v1 import agent_pb2 as pb

A = np.arange(4096, dtype=np.float32)
B = np.full(4096, 2.5, np.float32)
PLAN = StepsPlan(((0, StepRule.TOKENS), (1, StepRule.POSITIONS)), ((2, 1),), logits=0, steps=5, shapes=((1, 0, 4),))


@pytest.mark.ci
def test_agent_describes_board_without_session(connect, reached):
    reply = connect().describe()
    assert reply.machine.arch
    assert reply.machine.memory_bytes > 0
    assert {one.name for one in reply.runtimes} >= ({"mcu"} if reached.firmware else {"iree", "onnxruntime"})
    assert all(runtime.version and runtime.devices and not runtime.error for runtime in reply.runtimes)


def test_agent_loads_runs_and_unloads_program(client, add):
    add.push(client)
    loaded = add.load(client)
    assert [spec.shape for spec in loaded.inputs] == [(4096,), (4096,)]
    result = client.invoke(loaded.program_id, {"a": A, "b": B}, warmup=2, iterations=5)
    np.testing.assert_array_equal(next(iter(result.outputs.values())), A + B)
    assert len(result.iterations_ns) == 5
    assert all(start < end for start, end in result.iterations_ns)
    assert result.warmup_ns > 0
    # A microcontroller reports the RAM of its firmware, with three tensors of 16 KiB.
    assert result.peak_memory_bytes > (3 << 14 if add.runtime == "mcu" else 1 << 20)
    client.unload(loaded.program_id)
    with pytest.raises(errors.RunFailed, match="program not loaded"):
        client.invoke(loaded.program_id, {"a": A, "b": B})


def test_agent_counts_instructions_or_explains_why_not(client, add):
    add.push(client)
    plain = add.load(client)
    assert client.invoke(plain.program_id, {"a": A, "b": B}).instructions is None
    client.unload(plain.program_id)  # a microcontroller holds one program
    counted = add.load(client, instructions=True)
    for iterations in (3, 2):
        call = client.invoke(counted.program_id, {"a": A, "b": B}, warmup=1, iterations=iterations)
        found = call.instructions
        assert found is not None and bool(found.counts) != bool(found.problem)
        assert len(found.counts) in (0, iterations)
        assert len(call.iterations_ns) == iterations


@pytest.fixture(params=["iree", "onnxruntime"])
def decoder(request, reached, tmp_path_factory):
    """Return a decoder, and its plan."""
    folder = tmp_path_factory.mktemp("decoder")
    if request.param == "onnxruntime":
        return program("onnxruntime", save_summing_model(folder / "m.onnx")), PLAN
    (folder / "m.mlir").write_text(step_function())
    return compile_mlir(folder / "m.mlir", reached.arch, folder / "m.vmfb"), replace(PLAN, bound=8, shapes=((1, 8, 4),))


def ids(*prompts):
    return {name: np.array(one, np.int64) for name, one in zip(steps.INPUTS, prompts, strict=True)}


def test_agent_generates_forced_tokens(client, decoder):
    model, plan = decoder
    model.push(client)
    loaded = model.load(client)
    inputs = ids([1, 4, 2], [5, 0], [6, 6, 6])
    result = client.invoke(loaded.program_id, inputs, warmup=1, iterations=2, steps=plan)
    logits, positions, tokens, cache = result.outputs.values()
    np.testing.assert_array_equal(logits, logits_of([1, 4, 2, 5, 0]))
    assert positions.tolist() == [0, 1, 2, 3, 4]
    assert tokens.tolist() == np.argmax(logits[2:], -1).tolist()
    assert cache.any() and result.repetition.is_stable
    calls = [1] * 5 if plan.bound else [3, 1, 1]
    assert [call.tokens for call in result.calls] == calls * 2
    assert all(call.start_ns <= call.end_ns for call in result.calls)


@pytest.mark.ci
def test_agent_generates_tokens_with_largest_logits(client, decoder):
    model, plan = decoder
    model.push(client)
    loaded = model.load(client)
    plan = replace(plan, steps=4)
    outputs = client.invoke(loaded.program_id, ids([1, 4], [], []), steps=plan).outputs
    tokens = outputs[steps.TOKENS].tolist()
    for at in range(5):
        assert tokens[at] == np.argmax(logits_of([1, 4, *tokens[:at]])[-1])
    stopped = client.invoke(loaded.program_id, ids([1, 4], [], []), steps=replace(plan, stop=(tokens[0],)))
    assert stopped.outputs[steps.TOKENS].tolist() == tokens[:1]


# Changes to a plan, inputs, and the expected error.
INVALID_STEPS = [
    ({"logits": 7}, ids([1], [], []), "outputs .* are out of range"),
    ({"feedback": ((9, 1),)}, ids([1], [], []), "inputs .* are repeated or out of range"),
    ({"shapes": ((1, 8, 3),)}, ids([1], [], []), "does not take an empty cache of shape 1x8x3"),
    ({"rules": ()}, ids([1], [], []), "one input must take the tokens"),
    ({"prompts": (PromptFunction("f", (0,), (0,)),)}, ids([1], [], []), "function 'f' has invalid inputs"),
    ({"prompts": (PromptFunction("f", (0, 1, 2), (0, 1)),)}, ids([1], [], []), "function 'f'|'f' not found"),
    ({}, ids([], [], []), "the prompt is empty"),
    ({"bound": 8}, ids([1] * 9, [], []), "exceed the cache of 8 tokens"),
    ({}, {"prompt": np.array([1])}, "takes 3 inputs, got 1"),
    ({}, {**ids([1], [], []), "prompt": np.float32([1])}, "does not take a 1 float32 tensor"),
]


@pytest.mark.ci
def test_agent_rejects_invalid_steps_and_retains_program(client, decoder):
    model, plan = decoder
    model.push(client)
    loaded = model.load(client)
    for change, inputs, words in INVALID_STEPS:
        with pytest.raises(errors.HilError, match=words):
            client.invoke(loaded.program_id, inputs, steps=replace(plan, **change))
        client.invoke(loaded.program_id, ids([1, 4], [], []), steps=plan)


def test_agent_skips_payload_of_known_blob(client, add):
    add.push(client)
    before = client.payload_bytes_sent
    add.push(client)
    assert client.missing(list(add.digests.values())) == {}
    assert client.payload_bytes_sent == before


def test_agent_returns_uploaded_blob_unchanged(client, tmp_path):
    data = np.random.default_rng(0).bytes(3_000_001)
    (tmp_path / "blob").write_bytes(data)
    for algorithm in ("blake3", "sha256"):
        name = digest_of(data, algorithm)
        client.put({name: (tmp_path / "blob", 0)})
        assert client.get(name) == data


def test_agent_rejects_blob_with_wrong_digest(client, tmp_path):
    (tmp_path / "blob").write_bytes(b"not what it says")
    wrong = digest_of(b"something else")
    with pytest.raises(errors.BlobDamaged, match="digest mismatch"):
        client.put({wrong: (tmp_path / "blob", 0)})
    assert client.missing([wrong]) == {wrong: 0}


@pytest.mark.ci
def test_agent_streams_large_tensors_both_ways(client, reached, tmp_path):
    if reached.firmware:
        pytest.skip("firmware has fixed shapes")
    import onnx
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "neg", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "n.onnx")
    name = digest_of((tmp_path / "n.onnx").read_bytes())
    client.put({name: (tmp_path / "n.onnx", 0)})
    loaded = client.load({"n.onnx": name}, "n.onnx", runtime="onnxruntime", device="", function="", timeout=120)
    for size in (1, 65_537, 5_000_003):
        x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        target = np.empty_like(x)
        result = client.invoke(loaded.program_id, {"x": x}, into={"y": target})
        np.testing.assert_array_equal(result.outputs["y"], -x)
        if x.nbytes > 1 << 20:
            np.testing.assert_array_equal(target, -x)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"a": A}, "takes 2 inputs, got 1"),
        ({"a": A, "b": B.astype(np.float64)}, "does not take a 4096 float64 tensor"),
        ({"a": A, "b": B[:10]}, "does not take a 10 float32 tensor"),
        ({"a": A.reshape(64, 64), "b": B}, "does not take a 64x64 float32 tensor"),
    ],
)
def test_agent_rejects_mismatched_inputs_and_retains_program(client, add, inputs, words):
    add.push(client)
    loaded = add.load(client)
    with pytest.raises(errors.RunFailed, match=words):
        client.invoke(loaded.program_id, inputs)
    result = client.invoke(loaded.program_id, {"a": A, "b": B})
    np.testing.assert_array_equal(next(iter(result.outputs.values())), A + B)


def test_agent_reports_invalid_program_as_load_error(client, add, tmp_path):
    data = add.path.read_bytes()[: add.path.stat().st_size // 2]
    (tmp_path / add.path.name).write_bytes(data)
    name = digest_of(data)
    client.put({name: (tmp_path / add.path.name, 0)})
    with pytest.raises(errors.LoadFailed):
        client.load({add.path.name: name}, add.path.name, runtime=add.runtime, device="", function="", timeout=120)


def test_agent_rejects_unknown_runtime_device_or_function(client, add):
    add.push(client)
    with pytest.raises(errors.LoadFailed, match="runtime 'nothing' not found on this board"):
        add.load(client, runtime="nothing")
    with pytest.raises(errors.BoardUnfit, match="cannot find device 'nowhere'"):
        add.load(client, device="nowhere")
    if add.runtime == "iree":
        with pytest.raises(errors.LoadFailed, match="missing_function"):
            add.load(client, function="missing_function")


def test_agent_rejects_program_file_outside_directory(client, add):
    add.push(client)
    for name in ("../../escape.vmfb", "/tmp/escape.vmfb", "a/../../escape"):
        with pytest.raises(errors.LoadFailed, match="invalid program file name"):
            client.load(
                {name: next(iter(add.digests.values()))}, name, runtime=add.runtime, device="", function="", timeout=5
            )


def test_agent_rejects_calls_without_session_token(connect, client, add):
    add.push(client)
    stranger = connect()
    for call in (lambda: stranger.missing([]), lambda: add.load(stranger), lambda: stranger.logs()):
        with pytest.raises(errors.SessionEnded):
            call()


def test_agent_allows_single_session_at_a_time(connect, client):
    told: list[str] = []
    with pytest.raises(errors.BoardBusy, match="contract test"):
        connect().open_session("second", wait_s=2, on_wait=told.append)
    assert told
    client.close_session()
    assert connect().open_session("second", wait_s=60, on_wait=print) > 0


def test_agent_gives_free_board_to_waiting_client(connect, client):
    threading.Timer(0.3, client.close_session).start()
    start = time.monotonic()
    connect().open_session("patient", wait_s=60, on_wait=print)
    assert time.monotonic() - start < 30


@pytest.mark.ci
def test_agent_higher_fence_takes_board_over(connect, client, add):
    add.push(client)
    loaded = add.load(client)
    client.invoke(loaded.program_id, {"a": A, "b": B})
    fence = connect().describe().fence
    newer = connect()
    assert newer.open_session("takes over", fence=fence + 10, on_wait=print) == fence + 10
    # On the stream of the previous call, and on a new stream.
    for call in (lambda: client.invoke(loaded.program_id, {"a": A, "b": B}), lambda: add.load(client)):
        with pytest.raises(errors.SessionEnded):
            call()
    with pytest.raises(errors.BoardBusy, match="stale fence"):
        connect().open_session("late", fence=fence + 9, on_wait=print)
    add.load(newer)


@pytest.mark.ci
def test_agent_ends_queued_calls_with_session(connect, client, add):
    add.push(client)
    loaded = add.load(client)

    def call() -> BaseException | None:
        try:
            client.invoke(loaded.program_id, {"a": A, "b": B}, iterations=1_000_000)
        except errors.HilError as error:
            return error
        return None

    # One of the calls runs; the others wait.
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(call) for _ in range(4)]
        time.sleep(0.5)
        connect().open_session("takes over", fence=client.describe().fence + 1, on_wait=print)
        ended = [one.result() for one in calls]
    assert [type(error) for error in ended] == [errors.SessionEnded] * 4, ended


def test_agent_ends_uploads_with_session(connect, client):
    call = client._begin("Put")
    empty, next_one = (pb.PutRequest(start=pb.PutStart(digest=digest_of(data), size=len(data))) for data in (b"", b"1"))
    call.send(empty)
    assert call.receive().digest == empty.start.digest
    connect().open_session("takes over", fence=client.describe().fence + 1, on_wait=print)
    with pytest.raises(CallFailed) as caught:
        call.send(next_one)
        call.receive()
    assert type(wire_errors.decode_error(caught.value.error)) is errors.SessionEnded


@pytest.mark.ci
def test_agent_allows_highest_fence_in_sequence_only(connect, client):
    fence = client.describe().fence
    again = connect()
    with pytest.raises(errors.BoardBusy, match="contract test"):
        again.open_session("again", fence=fence, wait_s=2, on_wait=print)
    client.close_session()
    assert again.open_session("again", fence=fence, wait_s=60, on_wait=print) == fence


def held(client, ttl_s):
    """Open a session without sending keepalives, and return the call."""
    call = client._calls.begin("Hold")
    call.send(pb.HoldRequest(open=pb.SessionOpen(owner="silent", ttl_s=ttl_s)))
    return call


@pytest.mark.ci
def test_agent_ends_session_without_keepalives(connect):
    silent = connect()
    replies = list(held(silent, 0.5))
    assert replies[0].opened.token
    assert "no message for" in replies[-1].over.reason


@pytest.mark.ci
def test_agent_upload_extends_session(connect):
    """Keepalives may wait behind the upload's data."""
    owner = connect()
    replies = held(owner, 1.5)
    call = owner._calls.begin("Put", next(replies).opened.token)
    content = bytes(range(40)) * 1000
    call.send(pb.PutRequest(start=pb.PutStart(digest=digest_of(content), size=len(content))))
    for at in range(0, len(content), 4000):
        time.sleep(0.3)
        call.send(memoryview(content[at : at + 4000]))
    call.end()
    assert [reply.digest for reply in call] == [digest_of(content)]
    assert "no message for" in list(replies)[-1].over.reason


def test_agent_clock_error_below_half_round_trip(connect):
    pings = connect().pings(16)
    found = fit(pings)
    # The bound covers the first and the last ping, and rounding to the host's longer nanoseconds.
    since = pings[-1].received_ns - pings[0].sent_ns
    most = min(ping.round_trip_ns for ping in pings) / 2 + MAX_DRIFT * since
    assert found.error_ns <= 1.003 * most + 4
    assert found.jumped_ns == 0
    assert all(ping.sent_ns < ping.received_ns for ping in pings)


def test_agent_profiles_program_in_separate_pass(client, add, profiler):
    add.push(client)
    loaded = add.load(client)
    taken = client.profile(
        loaded.program_id, {"a": A, "b": B}, tool=profiler(client, add.runtime), warmup=1, iterations=3
    )
    files = {"iree": "profile.ireeprof", "onnxruntime": "onnxruntime.json", "mcu": "operations.json"}
    name = files[add.runtime]
    assert list(taken.files) == [name]
    assert len(taken.files[name]) > 100
    if add.runtime != "mcu":  # its operations have times on the agent's clock
        (first, first_board), (last, last_board) = taken.clock_pairs
        assert first < last
        assert taken.board.start_ns <= first_board < last_board <= taken.board.end_ns
    assert taken.host.start_ns < taken.host.end_ns
    assert (taken.warmup, taken.iterations) == (1, 3)
    result = client.invoke(loaded.program_id, {"a": A, "b": B})
    np.testing.assert_array_equal(next(iter(result.outputs.values())), A + B)


def test_agent_rejects_profile_with_mismatched_inputs(client, add, profiler):
    add.push(client)
    loaded = add.load(client)
    with pytest.raises(errors.RunFailed, match="takes 2 inputs, got 1"):
        client.profile(loaded.program_id, {"a": A}, tool=profiler(client, add.runtime))
    client.invoke(loaded.program_id, {"a": A, "b": B})


def test_agent_rejects_profile_with_missing_tool(client, add):
    add.push(client)
    loaded = add.load(client)
    with pytest.raises(errors.BlobDamaged, match="is not on the board"):
        client.profile(loaded.program_id, {"a": A, "b": B}, tool=digest_of(b"no such tool"))


def test_agent_streams_counters_before_cancel(client, add):
    add.push(client)
    loaded = add.load(client)
    stream = client.counters(0.02)
    looks = [next(stream) for _ in range(4)]
    stream.cancel()
    stamps = [look.clock_ns for look in looks]
    assert stamps == sorted(set(stamps))
    units = {reading.name: reading.unit for look in looks for reading in look.readings}
    assert units["agent memory"] == units[f"worker {loaded.worker_pid} memory"] == units["memory available"] == "bytes"
    assert all(reading.unit for look in looks for reading in look.readings)
    client.unload(loaded.program_id)


@pytest.mark.ci
@pytest.mark.parametrize("period_s", [0.02, 60])
def test_agent_ends_counters_with_session(connect, client, period_s):
    watching = client.counters(period_s)
    next(watching)
    client.close_session()
    closed = time.monotonic()
    for _ in watching:
        pass
    assert time.monotonic() - closed < 30
    # Over gRPC the refusal arrives with the first reply.
    with pytest.raises((CallFailed, errors.SessionEnded)):
        next(connect().counters(0.02))


@pytest.mark.parametrize("period_s", [0.001, 61])
def test_agent_rejects_counter_period_out_of_range(client, period_s):
    with pytest.raises(CallFailed, match="10 to 60000 ms"):
        next(client.counters(period_s))


@pytest.fixture
def sensor(reached, tmp_path, request):
    """Return a function that writes a file of a fake sensor on the agent's machine, and returns its directory."""
    if reached.firmware:
        pytest.skip("a microcontroller has no sensors that its agent can read")

    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        if reached.board:
            board = request.getfixturevalue("board_x86" if reached.arch == "x86_64" else "board_aarch64")
            # Other tests check that the board has no files that each login may read.
            script = f"umask 077 && mkdir -p {tmp_path} && echo {text} > {tmp_path}/{name}"
            board.run(["sh", "-c", script], check=True)
        return str(tmp_path)

    return write


def test_agent_streams_power_on_its_clock(client, sensor):
    folder = sensor("power1_input", "2500000")
    earliest = client.describe().clock_ns
    stream, first = client.open_power("hwmon", folder, 1, 500.0)
    found = [first]
    while sum(len(one.values) for one in found) < 20:
        found.append(next(stream))
    stream.cancel()
    stamps = [at for one in found for at in one.clock_ns]
    assert stamps == sorted(set(stamps))
    assert earliest <= stamps[0] <= stamps[-1] <= client.describe().clock_ns
    assert {value for one in found for value in one.values} == {2.5}
    assert not any(one.counts_energy or one.lost for one in found)


def test_agent_refuses_missing_sensor(client, sensor):
    folder = sensor("power1_input", "1")
    with pytest.raises(errors.BoardUnfit, match="has no power sensor for channel 3") as caught:
        client.open_power("hwmon", folder, 3, 100.0)
    assert "sensor" in caught.value.hint


@pytest.mark.ci
def test_agent_ends_power_when_the_sensor_fails(client, sensor):
    sensor("max_energy_range_uj", "1000")
    stream, first = client.open_power("rapl", sensor("energy_uj", "400"), 0, 500.0)
    assert first.counts_energy
    sensor("energy_uj", "300")
    with pytest.raises(CallFailed, match="reading the sensor failed: "):
        for _ in stream:
            pass


@pytest.mark.ci
def test_agent_ends_power_with_session(client, sensor):
    stream, _ = client.open_power("hwmon", sensor("power1_input", "1"), 1, 100.0)
    client.close_session()
    for _ in stream:
        pass


def test_agent_serves_health_and_reflection(address):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="hil.v1.Programs"))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        listed = next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked))
        assert "hil.v1.Blobs" in {service.name for service in listed.list_services_response.service}
