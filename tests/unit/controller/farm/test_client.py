"""Test the farm client: which calls it repeats, and how it converts gRPC errors."""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from support.fake_farm_client import board
from support.farm_keeper import free_ports
from support.interrupting import interrupted_at

from hil import errors
from hil.controller.farm.client import client as farm_client
from hil.controller.farm.client.client import FarmClient, open_channel
from hil.controller.farm.messages import JobSpec, Kind, Submission
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import encode_json, iter_methods
from hil.core.files import digest_file
from hil.errors import UsageError
from hil.protocol import grpc_calls, wire_errors
from hil.protocol.v1 import farm_pb2 as pb

ORDER = Submission("digits", (JobSpec(Kind.RUN),))


class Gateway:
    """Fake gateway with behaviours by method name; other methods are not implemented."""

    def __init__(self, address: str = "127.0.0.1:0", **behaviours):
        self.calls: list[tuple[str, object]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        table = {}
        for service in ("Farm", "Hosts", "Artifacts"):
            for name, path, kind, asked, answered in iter_methods(service):
                if name in behaviours:
                    make = getattr(grpc, f"{kind}_rpc_method_handler")
                    table[path] = make(
                        self._noting(name, behaviours[name]),
                        request_deserializer=asked.FromString,
                        response_serializer=answered.SerializeToString,
                    )
        self._server.add_generic_rpc_handlers((_Paths(table),))
        self.address = address.replace(":0", f":{self._server.add_insecure_port(address)}")
        self._server.start()

    def _noting(self, name, behaviour):
        def call(request, context):
            self.calls.append((name, request))
            return behaviour(request, context)

        return call

    def stop(self) -> None:
        self._server.stop(None).wait()


class _Paths(grpc.GenericRpcHandler):
    def __init__(self, table):
        self._table = table

    def service(self, details):
        return self._table.get(details.method)


@pytest.fixture
def gateway(request):
    running = []

    def start(*address, **behaviours):
        running.append(Gateway(*address, **behaviours))
        return running[-1]

    yield start
    for one in running:
        one.stop()


def away_once(then):
    """Return a behaviour that is unavailable for the first call."""
    called = []

    def behave(request, context):
        called.append(request)
        if len(called) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the database is away")
        return then(request)

    return behave


def client(*addresses: str, patience_s: float = 10.0) -> FarmClient:
    return FarmClient(FarmAddress(tuple(addresses), "hilf_secret"), patience_s=patience_s)


def test_client_retries_submit_with_same_key(gateway):
    reply = pb.SubmitReply(submission=17, jobs=["17"])
    server = gateway(Submit=away_once(lambda request: reply))
    with client(server.address) as farm:
        assert farm.submit(ORDER) == (17, ["17"])
    keys = [request.submission.key for _, request in server.calls]
    assert len(keys) == 2 and len(set(keys)) == 1


@pytest.mark.ci
def test_client_waits_for_gateway_restart(gateway):
    [port] = free_ports(1)
    lines, started = [], []
    behaviours = {"Ask": lambda request, context: pb.Answer(answer=encode_json([]))}
    late = threading.Timer(1.0, lambda: started.append(gateway(f"127.0.0.1:{port}", **behaviours)))
    late.start()
    with FarmClient(FarmAddress((f"127.0.0.1:{port}",), "t"), restart_s=20.0, say=lines.append) as farm:
        assert farm.ask("boards") == []
    assert lines == ["no farm gateway responds; waiting up to 20 s for a restart"]


def test_client_that_lost_its_gateway_says_that_none_answers(gateway):
    server = gateway(Ask=lambda request, context: pb.Answer(answer=encode_json([])))
    with client(server.address, patience_s=0.0) as farm:
        farm.close()
        with pytest.raises(errors.FarmUnreachable, match="does not respond: the connection is closed"):
            farm.ask("boards")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("sheet", "lines"), [("", 0), ('{"pid": 99999999}', 0), ('{"pid": "x"}', 0), ('{"pid": %d}', 1)]
)
def test_client_waits_for_local_farm_only_while_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sheet: str, lines: int
):
    monkeypatch.setenv("HIL_FARM_HOME", str(tmp_path))
    if sheet:
        (tmp_path / "up.json").write_text(sheet.replace("%d", str(os.getpid())))
    heard: list[str] = []
    with pytest.raises(errors.FarmUnreachable, match="no farm gateway responds"):
        FarmClient(FarmAddress((f"unix:{tmp_path}/gateway.sock",), "t"), restart_s=0.6, say=heard.append)
    assert len(heard) == lines


def test_client_announces_retry(gateway):
    lines = []
    server = gateway(Ask=away_once(lambda request: pb.Answer(answer=encode_json([]))))
    with FarmClient(FarmAddress((server.address,), "t"), say=lines.append) as farm:
        assert farm.ask("boards") == []
    assert lines == ["the farm does not respond; retrying for up to 30 s"]


def test_client_never_repeats_changes(gateway):
    server = gateway(Do=away_once(lambda request: pb.Answer()))
    with client(server.address) as farm, pytest.raises(errors.FarmUnreachable, match="the database is away"):
        farm.do("drain", name="rpi5")
    assert len(server.calls) == 1


def test_client_switches_to_next_gateway(gateway):
    first = gateway(Ask=lambda request, context: pb.Answer(answer=encode_json([board("first")])))
    second = gateway(Ask=lambda request, context: pb.Answer(answer=encode_json([board("second")])))
    with client(first.address, second.address) as farm:
        assert farm.ask("boards")[0].name == "first"
        first.stop()
        assert farm.ask("boards")[0].name == "second"


@pytest.mark.slow
def test_client_survives_keyboard_interrupt_during_call(gateway):
    server = gateway(Ask=lambda request, context: pb.Answer(answer=encode_json([])))
    with client(server.address) as farm:
        tried = 0
        for number in itertools.count(1, 7):
            came, raised = interrupted_at(number, lambda: farm.ask("boards"))
            assert raised is came
            if not came:
                break
            tried += 1
            assert farm.ask("boards") == []
        assert tried > 10
        started = time.monotonic()
    assert time.monotonic() - started < grpc_calls.CLOSE_SECONDS, "the channel could not be closed"


def test_client_suggests_starting_farm_without_gateway():
    with pytest.raises(errors.FarmUnreachable, match="no farm gateway responds") as caught:
        client("unix:/nowhere/gateway.sock")
    assert "hil farm up" in caught.value.hint and caught.value.exit_code == errors.EXIT_BOARD


def test_client_raises_farm_error_with_hint(gateway):
    def refuse(request, context):
        error = errors.FarmError("no board matches gpu", hint="rpi5 has no gpu")
        context.set_trailing_metadata(((wire_errors.ERROR_KEY, wire_errors.to_message(error).SerializeToString()),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)

    server = gateway(Submit=refuse)
    with client(server.address) as farm, pytest.raises(errors.FarmError, match="no board matches") as caught:
        farm.submit(ORDER)
    assert caught.value.hint == "rpi5 has no gpu"


def test_client_rejects_oversized_response(gateway, monkeypatch):
    monkeypatch.setattr(farm_client, "_MAX_REPLY", 1 << 16)
    server = gateway(Ask=lambda request, context: pb.Answer(answer=encode_json("x" * (1 << 17))))
    with client(server.address, patience_s=1.0) as farm, pytest.raises(errors.FarmError, match="larger than max"):
        farm.ask("boards")


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 100_000, b'"\\ud800"', b'"\xed\xa0\x80"'])
def test_client_reports_invalid_json_as_farm_error(gateway, text):
    server = gateway(Ask=lambda request, context: pb.Answer(answer=pb.Json(text=text)))
    with client(server.address) as farm, pytest.raises(errors.FarmError, match="invalid response from the farm"):
        farm.ask("boards")


def test_client_reports_rejected_token_as_usage_error(gateway):
    server = gateway(Ask=lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such token"))
    with client(server.address) as farm, pytest.raises(errors.AccessRefused, match="no such token") as caught:
        farm.ask("jobs")
    assert caught.value.exit_code == errors.EXIT_USAGE


@pytest.mark.ci
def test_client_follow_resumes_after_last_line(gateway):
    def follow(request, context):
        for number in range(request.after + 1, request.after + 3):
            yield pb.FollowReply(log=pb.LogText(number=number, job="17", text=f"line {number}"))
        if request.after < 4:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")

    server = gateway(Follow=follow)
    with client(server.address) as farm:
        assert [reply.log.number for reply in farm.follow(["17"], logs=True)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.ci
def test_client_follow_pauses_after_short_streams(gateway):
    def follow(request, context):
        yield pb.FollowReply(job=pb.JobStatus(name="17", state="queued"))
        context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")

    server = gateway(Follow=follow)
    begun = time.monotonic()
    with client(server.address, patience_s=1.5) as farm, pytest.raises(errors.FarmUnreachable, match="restarting"):
        list(itertools.islice(farm.follow(["17"]), 300))
    assert len(server.calls) <= 4 and time.monotonic() - begun > 1


@pytest.mark.ci
@pytest.mark.parametrize("name", ["18", "18.1", "17.100001", "x", "17." + "1" * 100])
@pytest.mark.parametrize("kind", ["job", "log"])
def test_client_follow_rejects_other_jobs(gateway, name: str, kind: str):
    reply = pb.FollowReply(job={"name": name}) if kind == "job" else pb.FollowReply(log={"job": name})
    server = gateway(Follow=lambda request, context: iter([reply]))
    with client(server.address) as farm, pytest.raises(errors.FarmError, match="invalid response"):
        list(farm.follow(["17"]))


def test_client_follow_cuts_texts_of_jobs(gateway):
    sent = pb.JobStatus(name="17.3", state="queued", blocked="b" * 10**6, unrunnable="u" * 10**6)
    server = gateway(Follow=lambda request, context: iter([pb.FollowReply(job=sent)]))
    with client(server.address) as farm:
        (reply,) = farm.follow(["17"])
    assert (reply.job.blocked, reply.job.unrunnable) == ("b" * 1000, "u" * 1000)


def test_client_uploads_missing_files_and_verifies_downloads(gateway, tmp_path):
    files = {}
    for name in ("old", "new"):
        path = tmp_path / name
        path.write_bytes(name.encode() * 700_000)
        files[digest_file(path)] = path
    stored = {digest: path.read_bytes() for digest, path in files.items() if path.name == "old"}

    def upload(requests, context):
        for piece in requests:
            if piece.WhichOneof("kind") == "start":
                stored[digest := piece.start.digest] = b""
            else:
                stored[digest] += piece.data
        return pb.UploadReply(stored=list(stored))

    def download(request, context):
        data = stored[request.digest]
        yield pb.FilePiece(start=pb.FileStart(digest=request.digest, size=len(data)))
        yield pb.FilePiece(data=data)

    server = gateway(
        Lacks=lambda request, context: pb.LacksReply(digests=[one for one in request.digests if one not in stored]),
        Upload=upload,
        Download=download,
    )
    with client(server.address) as farm:
        assert farm.upload(files) == 3 * 700_000
        assert farm.upload(files) == 0
        for digest, path in files.items():
            farm.download(digest, tmp_path / "back" / path.name)
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
        stored[digest] = b"something else"
        with pytest.raises(
            errors.FarmError, match=f"digest mismatch in a file from the farm's store: expected {digest}"
        ):
            farm.download(digest, tmp_path / "wrong")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "new", "old"]


@pytest.mark.parametrize("address", ["nowhere", "host:port", ""])
def test_client_rejects_invalid_gateway_address(address):
    with pytest.raises(errors.UsageError, match="gateway address"):
        client(address)


@pytest.mark.parametrize("gateway", ["192.0.2.7:7070", "lab.example:7070", ":7070"])
def test_client_refuses_to_send_token_unencrypted(gateway: str, monkeypatch: pytest.MonkeyPatch):
    def never(*_: object) -> None:
        raise AssertionError("somebody was called")

    monkeypatch.setattr("socket.create_connection", never)
    with pytest.raises(UsageError, match="without TLS") as caught:
        FarmClient(FarmAddress((gateway,), "secret"), patience_s=0)
    assert "HIL_FARM_CA" in caught.value.hint
    with pytest.raises(UsageError, match="without TLS"):
        open_channel(gateway, None)


def silent(request, context):
    """Accept the call, but read and answer nothing until the caller gives up."""
    over = threading.Event()
    if context.add_callback(over.set):
        over.wait(120)
    return iter(())


def silent_call(request, context):
    for _ in silent(request, context):
        pass
    return pb.UploadReply()


@pytest.mark.ci
def test_client_times_out_on_silent_gateway(gateway, monkeypatch, tmp_path):
    monkeypatch.setattr(farm_client, "SILENT_S", 1.0)
    monkeypatch.setattr(farm_client, "_SILENT_FILE_S", 1.0)
    (tmp_path / "file").write_bytes(b"x" * 100)
    name = digest_file(tmp_path / "file")
    there = gateway(
        Follow=silent,
        Download=silent,
        Upload=silent_call,
        Ask=silent_call,
        Lacks=lambda request, context: pb.LacksReply(digests=request.digests),
    )
    with FarmClient(FarmAddress((there.address,), "t"), patience_s=1.0, call_s=1.0) as farm:
        for call in (
            lambda: list(farm.follow(["17"])),
            lambda: farm.download(name, tmp_path / "to"),
            lambda: farm.upload({name: tmp_path / "file"}),
            lambda: farm.ask("boards"),
        ):
            begin = time.monotonic()
            with pytest.raises(errors.FarmUnreachable):
                call()
            assert time.monotonic() - begin < 30


@pytest.mark.ci
def test_client_accepts_keepalive_as_activity(gateway, monkeypatch):
    monkeypatch.setattr(farm_client, "SILENT_S", 2.0)

    def quiet(request, context):
        for _ in range(8):
            time.sleep(0.5)
            yield pb.FollowReply()
        yield pb.FollowReply(job=pb.JobStatus(name="17"))

    there = gateway(Follow=quiet)
    with FarmClient(FarmAddress((there.address,), "t"), patience_s=0.0) as farm:
        assert [one.job.name for one in farm.follow(["17"])] == ["17"]
    assert len(there.calls) == 1
