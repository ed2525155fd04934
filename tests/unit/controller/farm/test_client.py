"""The client of a farm: what it repeats and what it never does, and what gRPC's errors become."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent import futures

import grpc
import pytest
from support.interrupting import interrupted_at

from hil import errors
from hil.controller.farm import client as farm_client
from hil.controller.farm.client import FarmClient, open_channel
from hil.controller.farm.messages import JobSpec, Kind, Submission
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import json_message, methods
from hil.core.digest import digest_file
from hil.errors import UsageError
from hil.protocol import grpc_calls, wire_errors
from hil.protocol.v1 import farm_pb2 as pb

ORDER = Submission("digits", (JobSpec(Kind.RUN),))


class Gateway:
    """A gateway of a made-up farm: behaviours by method's name; whatever has none is not implemented."""

    def __init__(self, address: str = "127.0.0.1:0", **behaviours):
        self.calls: list[tuple[str, object]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        table = {}
        for service in ("Farm", "Hosts", "Artifacts"):
            for name, path, kind, asked, answered in methods(service):
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
    """A behaviour that is away for the first call."""
    called = []

    def behave(request, context):
        called.append(request)
        if len(called) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the database is away")
        return then(request)

    return behave


def client(*addresses: str, patience_s: float = 10.0) -> FarmClient:
    return FarmClient(FarmAddress(tuple(addresses), "hilf_secret"), patience_s=patience_s)


def test_an_order_is_sent_again_under_the_same_key_while_the_farm_is_away(gateway):
    reply = pb.SubmitReply(submission=17, jobs=["17"])
    server = gateway(Submit=away_once(lambda request: reply))
    with client(server.address) as farm:
        assert farm.submit(ORDER) == (17, ["17"])
    keys = [request.submission.key for _, request in server.calls]
    assert len(keys) == 2 and len(set(keys)) == 1


def test_what_changes_something_is_never_sent_twice(gateway):
    server = gateway(Do=away_once(lambda request: pb.Answer()))
    with client(server.address) as farm, pytest.raises(errors.FarmUnreachable, match="the database is away"):
        farm.do("drain", name="rpi5")
    assert len(server.calls) == 1


def test_another_gateway_answers_where_the_first_is_gone(gateway):
    first = gateway(Ask=lambda request, context: pb.Answer(answer=json_message("first")))
    second = gateway(Ask=lambda request, context: pb.Answer(answer=json_message("second")))
    with client(first.address, second.address) as farm:
        assert farm.ask("boards") == "first"
        first.stop()
        assert farm.ask("boards") == "second"


def test_ctrl_c_at_any_step_of_a_call_ends_it_and_the_next_one_works(gateway):
    server = gateway(Ask=lambda request, context: pb.Answer(answer=json_message("there")))
    with client(server.address) as farm:
        tried = 0
        for number in itertools.count(1, 7):
            came, raised = interrupted_at(number, lambda: farm.ask("boards"))
            assert raised is came
            if not came:
                break
            tried += 1
            assert farm.ask("boards") == "there"
        assert tried > 10
        started = time.monotonic()
    assert time.monotonic() - started < grpc_calls.CLOSE_S, "the channel could not be closed"


def test_what_nobody_answers_is_said_with_what_to_do():
    with pytest.raises(errors.FarmUnreachable, match="no gateway") as caught:
        client("unix:/nowhere/gateway.sock")
    assert "hil farm up" in caught.value.hint and caught.value.exit_code == errors.EXIT_BOARD


def test_the_farms_own_errors_come_through_with_their_hints(gateway):
    def refuse(request, context):
        error = errors.FarmError("no board matches gpu", hint="rpi5 has no gpu")
        context.set_trailing_metadata(((wire_errors.ERROR_KEY, wire_errors.to_message(error).SerializeToString()),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)

    server = gateway(Submit=refuse)
    with client(server.address) as farm, pytest.raises(errors.FarmError, match="no board matches") as caught:
        farm.submit(ORDER)
    assert caught.value.hint == "rpi5 has no gpu"


def test_a_token_that_is_refused_is_bad_usage(gateway):
    server = gateway(Ask=lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such token"))
    with client(server.address) as farm, pytest.raises(errors.AccessRefused, match="no such token") as caught:
        farm.ask("jobs")
    assert caught.value.exit_code == errors.EXIT_USAGE


def test_following_goes_on_after_the_last_line_that_came(gateway):
    def follow(request, context):
        for number in range(request.after + 1, request.after + 3):
            yield pb.FollowReply(log=pb.LogText(number=number, job="17", text=f"line {number}"))
        if request.after < 4:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")

    server = gateway(Follow=follow)
    with client(server.address) as farm:
        assert [reply.log.number for reply in farm.follow(["17"], logs=True)] == [1, 2, 3, 4, 5, 6]


def test_only_what_the_store_lacks_is_sent_and_it_is_read_back_verified(gateway, tmp_path):
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
        with pytest.raises(errors.FarmError, match="is not"):
            farm.download(digest, tmp_path / "wrong")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "new", "old"]


@pytest.mark.parametrize("address", ["nowhere", "host:port", ""])
def test_what_is_no_address_is_bad_usage(address):
    with pytest.raises(errors.UsageError, match="no gateway's address"):
        client(address)


@pytest.mark.parametrize("gateway", ["192.0.2.7:7070", "lab.example:7070", ":7070"])
def test_no_token_is_sent_in_the_clear_to_another_machine(gateway: str, monkeypatch: pytest.MonkeyPatch):
    def never(*_: object) -> None:
        raise AssertionError("somebody was called")

    monkeypatch.setattr("socket.create_connection", never)
    with pytest.raises(UsageError, match="in the clear") as caught:
        FarmClient(FarmAddress((gateway,), "secret"), patience_s=0)
    assert "HIL_FARM_CA" in caught.value.hint
    with pytest.raises(UsageError, match="in the clear"):
        open_channel(gateway, None)


def silent(request, context):
    """Accepts the call, reads nothing and answers nothing, until its caller gives up."""
    over = threading.Event()
    if context.add_callback(over.set):
        over.wait(120)
    return iter(())


def silent_call(request, context):
    for _ in silent(request, context):
        pass
    return pb.UploadReply()


def test_a_gateway_that_accepts_and_says_nothing_is_noticed(gateway, monkeypatch, tmp_path):
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


def test_a_stream_that_only_says_that_it_is_there_goes_on(gateway, monkeypatch):
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
