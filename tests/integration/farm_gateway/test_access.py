"""Gateway permissions, and handling of malformed messages."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.certificates import write_certificate
from support.gateways import BareBoard, Running, report, rows, running_gateway, simple_order, token_of
from support.uplinks import uplink
from support.waiting import allowed_s, eventually

from hil.controller.farm.client.client import FarmClient, translate_grpc_error
from hil.controller.farm.host.gateway_link.uplink_call import ask
from hil.controller.farm.messages import BoardAccess, JobResult, Role
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import CONSOLE_KEY, SERVICES, encode_result, encode_submission, iter_methods
from hil.controller.records.lab.farm import CancelledJobs
from hil.errors import AccessRefused, FarmError, FarmUnreachable, UsageError, VersionMismatch
from hil.protocol.v1 import farm_pb2 as pb
from hil.protocol.versions import FARM_KEY, FARM_PROTOCOL

Client = Callable[..., FarmClient]
_METHODS = [(service, *method) for service in SERVICES for method in iter_methods(service)]
_IDS = [f"{service}.{name}" for service, name, *_ in _METHODS]


def send(farm: FarmClient, kind: str, path: str, raw: bytes, metadata: Any = None) -> None:
    """Send a raw message and read the reply."""
    make = getattr(farm._channel, kind)
    behaviour = make(path, request_serializer=lambda sent: sent, response_deserializer=lambda got: got)
    asked = iter([raw]) if kind.startswith("stream") else raw
    answered = behaviour(asked, metadata=farm.metadata if metadata is None else metadata, timeout=20)
    if kind.endswith("stream"):
        list(answered)


def call(farm: FarmClient, kind: str, path: str, raw: bytes, metadata: Any = None) -> grpc.RpcError:
    """Return the error reply to a raw message."""
    with pytest.raises(grpc.RpcError) as error:
        send(farm, kind, path, raw, metadata)
    return error.value


@pytest.mark.parametrize(("service", "name", "path", "kind", "asked", "_"), _METHODS, ids=_IDS)
def test_gateway_rejects_calls_without_valid_token(
    client: Client, service: str, name: str, path: str, kind: str, asked: Any, _: Any
) -> None:
    farm = client()
    for metadata in ([], [("authorization", "Bearer wrong")], [("authorization", "Basic YTpi")]):
        error = call(farm, kind, path, b"", metadata)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert isinstance(translate_grpc_error(error), AccessRefused)


# Choices of a oneof that take no text, or any text.
_WITHOUT_TEXT, _ANY_TEXT = {"boards", "audit", "tokens", "gc", "me", "reservations", "webhooks"}, {"events"}
# An empty text asks for all users.
_EMPTY_TEXT = {"access"}


def filled(kind: Any, text: str) -> Iterator[tuple[Any, str]]:
    """Yield messages with the text in every text field, one for each choice of a oneof, and that choice."""
    choices = [field for oneof in kind.DESCRIPTOR.oneofs for field in oneof.fields if field.message_type]
    for choice in choices or [None]:
        message = kind()
        fill(message, text, choice)
        yield message, choice.name if choice else ""


def fill(message: Any, text: str, choice: Any = None) -> None:
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None and field is not choice and choice is not None:
            continue
        if field.type == field.TYPE_STRING and field.is_repeated:
            getattr(message, field.name).append(text)
        elif field.type == field.TYPE_STRING:
            setattr(message, field.name, text)
        elif field.type == field.TYPE_BYTES:
            setattr(message, field.name, text.encode())
        elif field.message_type and not field.is_repeated:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), text)


@pytest.mark.parametrize(("service", "name", "path", "kind", "asked", "_"), _METHODS, ids=_IDS)
def test_malformed_request_raises_usage_error(
    client: Client, service: str, name: str, path: str, kind: str, asked: Any, _: Any
) -> None:
    farm = client()
    error = translate_grpc_error(call(farm, kind, path, b"\xff\xff\xff"))
    assert isinstance(error, UsageError) and (name in ("Dial", "Accept") or "not a message" in error.message)
    for text in ("", "\0", "[" * 100_000):
        for said, choice in filled(asked, text):
            is_empty = choice in _EMPTY_TEXT and not text
            if choice in _WITHOUT_TEXT or is_empty or (choice in _ANY_TEXT and text != "\0"):
                send(farm, kind, path, said.SerializeToString())
            elif not isinstance(
                translate_grpc_error(call(farm, kind, path, said.SerializeToString())), (UsageError, FarmError)
            ):
                raise AssertionError(said)
    assert not [one for one in farm.ask("audit") if "Traceback" in json.dumps(one.to_json())]


def test_gateway_survives_text_with_nul_bytes(client: Client, board: BareBoard) -> None:
    farm = client()
    order = encode_submission(simple_order(title="nul"))
    reply = farm.stub.Submit(pb.SubmitRequest(submission=order, trace="00-\0-1"), metadata=farm.metadata)
    assert reply.submission
    resume = pb.LeaseRequest(resume=pb.ResumeLease(lease=1, key="a\0b"))
    with pytest.raises(grpc.RpcError) as refused:
        list(farm.stub.Lease(iter([resume]), metadata=farm.metadata))
    assert isinstance(translate_grpc_error(refused.value), AccessRefused)


def test_audit_excludes_oversized_arguments(client: Client, farm_db: str) -> None:
    with pytest.raises(UsageError, match="at most"):
        client().do("drain", name="1", reason="x" * 30_000)
    assert rows(farm_db, "select * from hil.audit where action = 'Farm.Do drain'") == []


def test_gateway_survives_oversized_request(client: Client) -> None:
    farm = client()
    with pytest.raises(FarmError, match="RESOURCE_EXHAUSTED"):
        farm.submit(simple_order(title="x" * (65 << 20)))
    assert farm.ask("jobs") == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"title": "x" * 30_000},
        {"key": "short"},
        {"key": "with space"},
        {"priority": "urgent"},
        {"timeout_s": -1},
        {"max_attempts": 0},
        {"specs": []},
        {"specs": [{"kind": "health"}]},
        {"specs": [{"kind": "run", "files": {"../../etc/passwd": "blake3:" + "0" * 64}}]},
        {"specs": [{"kind": "run", "files": {"/etc/passwd": "blake3:" + "0" * 64}}]},
        {"specs": [{"kind": "run", "files": {"model.onnx": "md5:0"}}]},
        {"specs": [{"kind": "run", "options": {"text": b"[]"}}]},
        {"specs": [{"kind": "dance"}]},
        {"title": "nul \0"},
        {"specs": [{"kind": "run", "options": {"text": b'{"deep": "nul \\u0000"}'}}]},
    ],
    ids=range(15),
)
def test_gateway_rejects_invalid_submission(client: Client, board: BareBoard, wrong: dict[str, Any]) -> None:
    farm = client()
    given = encode_submission(simple_order())
    for name, value in wrong.items():
        given.ClearField(name)
        given.MergeFrom(pb.Submission(**{name: value}))
    with pytest.raises(grpc.RpcError) as refused:
        farm.stub.Submit(pb.SubmitRequest(submission=given), metadata=farm.metadata)
    assert isinstance(translate_grpc_error(refused.value), UsageError), refused.value
    assert board.grants.empty()


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (Role.VIEWER, {"Ask boards", "Follow"}),
        (Role.SUBMITTER, {"Ask boards", "Follow", "Submit", "Lacks"}),
        (Role.HOST, {"Ask boards", "Follow", "Submit", "Lacks", "Report"}),
        (Role.ADMIN, {"Ask boards", "Follow", "Submit", "Lacks", "Report", "Ask audit", "Ask tokens", "Do drain"}),
    ],
    ids=["viewer", "submitter", "host", "admin"],
)
def test_role_limits_allowed_calls(client: Client, board: BareBoard, role: Role, allowed: set[str]) -> None:
    farm, admin = client("someone", role), client()
    _, [job] = admin.submit(simple_order())
    board.report(board.send_grant())
    tries: dict[str, Callable[[], Any]] = {
        "Ask boards": lambda: farm.ask("boards"),
        "Ask audit": lambda: farm.ask("audit"),
        "Ask tokens": lambda: farm.ask("tokens"),
        "Follow": lambda: list(farm.follow([job])),
        "Submit": lambda: farm.submit(simple_order()),
        "Lacks": lambda: farm.upload({}),
        "Report": lambda: report(farm, 1, "nobody", JobResult(0)),
        "Do drain": lambda: farm.do("drain", name="rpi"),
    }
    for name, attempt in tries.items():
        if name in allowed:
            attempt()
            continue
        with pytest.raises(AccessRefused):
            attempt()
    refused = {one.action.removeprefix("Farm.") for one in admin.ask("audit") if not one.allowed}
    assert {one.rpartition(".")[2] for one in refused} == set(tries) - allowed


def test_submitter_cannot_change_jobs_of_other_user(client: Client, board: BareBoard) -> None:
    anna, bert, admin = client("anna", Role.SUBMITTER), client("bert", Role.SUBMITTER), client("root", Role.ADMIN)
    _, [job] = anna.submit(simple_order())
    board.send_grant()
    for attempt in (lambda: bert.do("cancel", name=job), lambda: bert.do("priority", name=job, priority="high")):
        with pytest.raises(AccessRefused, match="anna"):
            attempt()
    assert bert.ask("job", name=job).state == "running"  # users can see jobs that they cannot change
    assert admin.do("cancel", name=job) == CancelledJobs(cancelled=[job])


def test_revoked_and_expired_tokens_end_calls_and_streams(
    client: Client, gateway: Running, farm_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hil.controller.farm.gateway.calls._RECHECK_S", 0.1)
    admin = client()
    made = admin.do("token", user="lab", role="host", expires_s=3600, note="room 4")
    with gateway.client(made.token, patience_s=0) as lab:
        attending = BareBoard(lab, "rpi").online()
        [row] = [one for one in admin.ask("tokens") if one.user == "lab"]
        assert row.good and row.note == "room 4" and made.token not in json.dumps(row.to_json())
        admin.do("revoke", id=row.id)
        with pytest.raises(AccessRefused):
            lab.ask("boards")
        eventually(lambda: attending.error)
        assert isinstance(attending.error, grpc.Call) and attending.error.code() is grpc.StatusCode.UNAUTHENTICATED
        attending.cut()
    short = admin.do("token", user="guest", role="viewer", expires_s=3600)
    with gateway.client(short.token, patience_s=0) as guest:
        guest.ask("boards")
        assert rows(farm_db, "update hil.tokens set expires_at = now() where user_name = 'guest' returning id")
        time.sleep(2.6)  # longer than the token cache
        with pytest.raises(AccessRefused):
            guest.ask("boards")


def test_audit_records_every_change(client: Client, board: BareBoard, farm_db: str) -> None:
    farm = client()
    _, [job] = farm.submit(simple_order(title="seen"))
    farm.do("cancel", name=job)
    farm.do("drain", name="rpi", reason="cable")
    farm.do("resume", name="rpi")
    farm.do("gc", dry_run=True)
    found = [(one.user, one.action, one.object) for one in farm.ask("audit") if one.allowed]
    for what in (("Farm.Submit", job), ("Farm.Do cancel", job), ("Farm.Do drain", "rpi"), ("Farm.Do resume", "rpi")):
        assert ("anna", *what) in found
    assert ("anna", "Farm.Do gc", "") in found and ("lab", "Hosts.Attend", "rpi") in found
    assert rows(farm_db, "select count(*) as n from hil.audit where peer = ''") == [{"n": 0}]


def test_unauthenticated_calls_do_not_flood_audit(client: Client, farm_db: str) -> None:
    farm = client()
    begin = time.monotonic()
    for _ in range(100):
        with pytest.raises(grpc.RpcError):
            farm.stub.Ask(pb.AskRequest(boards=pb.Empty()), metadata=[("authorization", "Bearer x")])
    noted = rows(farm_db, "select count(*) as n from hil.audit")[0]["n"]
    assert noted <= 10 * (time.monotonic() - begin + 2)


# TLS ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    files = write_certificate(tmp_path_factory.mktemp("tls"))
    return files.cert, files.key


def test_remote_listener_requires_tls(farm_db: str, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    for listen in ("0.0.0.0:0", "[::]:0", "example.org:0"):
        with pytest.raises(UsageError, match="TLS"), running_gateway(farm_db, tmp_path, listen=(listen,)):
            pass
    listen = (f"unix:{tmp_path}/own.sock", "0.0.0.0:0")
    with running_gateway(farm_db, tmp_path, listen=listen, tls_cert=cert, tls_key=key) as running:
        assert running.gateway is not None
        port = running.gateway.addresses[1].rpartition(":")[2]
        token = token_of(farm_db, "anna")
        with FarmClient(FarmAddress((f"localhost:{port}",), token, cert)) as farm:
            assert farm.ask("boards") == []
        with pytest.raises(FarmError):
            FarmClient(FarmAddress((f"localhost:{port}",), token), patience_s=0)
        assert Path(f"{tmp_path}/own.sock").stat().st_mode & 0o777 == 0o700
        host = FarmAddress((f"localhost:{port}",), token_of(farm_db, "host", Role.HOST), cert)
        request = pb.ReportRequest(lease=1, worker="w", result=encode_result(JobResult(0, "PASS")))
        with uplink(host, tmp_path / "uplink") as path:
            assert not ask(path, "Report", request, 60.0).recorded


@pytest.mark.slow
def test_gateway_uses_renewed_certificate_after_expiry(farm_db: str, tmp_path: Path) -> None:
    files = write_certificate(tmp_path, valid_s=allowed_s(8))
    listen = ("localhost:0", f"unix:{tmp_path}/own.sock")
    tls = {"tls_cert": files.cert, "tls_key": files.key}
    with running_gateway(farm_db, tmp_path, listen=listen, metrics="127.0.0.1:0", **tls) as running:
        address = FarmAddress((running.address,), token_of(farm_db, "host", Role.HOST), files.cert)

        def read_remaining_s() -> float:
            with urllib.request.urlopen(f"http://{running.gateway.metrics}/metrics") as reply:
                found = re.search(r"^hil_farm_certificate_expires_timestamp_seconds (\S+)", reply.read().decode(), re.M)
            return float(found[1]) - time.time()

        def is_refused() -> bool:
            try:
                FarmClient(address, patience_s=0).close()
            except FarmUnreachable:
                return True
            return False

        assert 0 < read_remaining_s() < 3600
        with FarmClient(address) as before, uplink(address, tmp_path / "uplink") as path:
            request = pb.ReportRequest(lease=1, worker="w", result=encode_result(JobResult(0, "PASS")))
            ask(path, "Report", request, 60.0)
            eventually(is_refused, every_s=0.5)
            assert read_remaining_s() < 0
            # Existing connections continue.
            assert before.ask("me").user == "host"
            ask(path, "Report", request, 60.0)
            write_certificate(tmp_path)
            assert not is_refused()
            assert before.ask("me").user == "host"
            assert read_remaining_s() > 3600
            # After a loss of the connection, a host and a client read the file of the CA again.
            before.connect()
            assert before.ask("me").user == "host"
        with uplink(address, tmp_path / "uplink2") as path:
            assert not ask(path, "Report", request, 60.0).recorded


def test_gateway_rejects_address_in_use(gateway: Running, farm_db: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is already in use"), running_gateway(farm_db, tmp_path):
        pass


def test_repeated_refusals_do_not_flood_audit(client: Client, farm_db: str) -> None:
    viewer, admin = client("eve", Role.VIEWER), client("root")
    for _ in range(200):
        with pytest.raises(AccessRefused):
            viewer.do("cancel", name="1")
        with pytest.raises(AccessRefused):
            viewer.do("gc")
    refused = [one for one in admin.ask("audit") if not one.allowed]
    assert sorted(one.action for one in refused) == ["Farm.Do cancel", "Farm.Do gc"]


def test_gateway_limits_open_calls_per_user(client: Client, board: BareBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.farm.gateway.calls._MOST_OF_USER", 20)
    eve, anna = client("eve", Role.SUBMITTER), client("ann", Role.SUBMITTER)
    _, [job] = anna.submit(simple_order())
    board.send_grant()
    followed = [eve.stub.Follow(pb.FollowRequest(jobs=[job]), metadata=eve.metadata) for _ in range(20)]
    for one in followed:
        next(one)
    with pytest.raises(FarmError, match="eve already has 20 open calls"):
        eve.ask("boards")
    assert anna.ask("boards") and anna.submit(simple_order())
    for one in followed:
        one.cancel()
    eventually(lambda: not _refused(lambda: eve.ask("boards")))


def _refused(call: Any) -> bool:
    try:
        call()
    except FarmError:
        return True
    return False


def test_gateway_rejects_different_farm_protocol(client: Client) -> None:
    farm = client()
    metadata = [("authorization", f"Bearer {farm.address.token}"), (FARM_KEY, "7 9.9")]
    for _, _, path, kind, *_ in _METHODS:
        error = translate_grpc_error(call(farm, kind, path, b"", metadata))
        assert isinstance(error, VersionMismatch)
        assert "hil 9.9 (farm protocol 7)" in error.message
        assert f"(farm protocol {FARM_PROTOCOL})" in error.message


def test_console_of_restricted_board_is_refused(client: Client) -> None:
    private = BareBoard(client("lab", Role.HOST), "bench", access=BoardAccess(groups=("vision",))).online()
    farm = client("eve", Role.SUBMITTER)

    def find_refusal(name: str, who: FarmClient) -> Exception:
        with pytest.raises(grpc.RpcError) as refused:
            list(who.stub.Dial(iter(()), metadata=[*who.metadata, (CONSOLE_KEY, name)], timeout=allowed_s(15)))
        return translate_grpc_error(refused.value)

    error = find_refusal("bench", farm)
    assert isinstance(error, AccessRefused) and "bench is restricted" in error.message
    assert not private.told("dial")
    private.leave()
    assert "not found" in str(find_refusal("nope", farm))
