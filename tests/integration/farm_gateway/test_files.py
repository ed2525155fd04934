"""Job files at a gateway: sent once, verified, downloaded, and deleted when unreferenced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from support.gateways import BareBoard, Running, rows, simple_order

from hil.controller.farm.client.client import FarmClient, translate_grpc_error
from hil.controller.farm.messages import JobResult, JobSpec, Kind
from hil.core.digest import digest_of
from hil.errors import FarmError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

Client = Callable[..., FarmClient]


def files_of(folder: Path, *contents: bytes) -> dict[str, Path]:
    made = {}
    for number, content in enumerate(contents):
        path = folder / f"file{number}"
        path.write_bytes(content)
        made[digest_of(content)] = path
    return made


def upload(farm: FarmClient, *pieces: pb.FilePiece) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refused:
        farm.stub.Upload(iter(pieces), metadata=farm.metadata)
    return refused.value


def test_upload_skips_stored_files_and_download_matches(client: Client, tmp_path: Path, farm_db: str) -> None:
    farm, big = client(), bytes(range(256)) * 30_000
    files = files_of(tmp_path, big, b"small", b"")
    assert farm.upload(files) == len(big) + 5
    assert farm.upload(files) == 0
    for digest, path in files.items():
        farm.download(digest, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == path.read_bytes()
    known = {row["digest"]: row["size"] for row in rows(farm_db, "select digest, size from hil.artifacts")}
    assert known == {digest: path.stat().st_size for digest, path in files.items()}
    [said] = [one for one in farm.ask("audit") if one.action == "Artifacts.Upload"]
    assert said.detail == {"files": 3, "bytes": len(big) + 5}


def test_upload_rejects_mismatched_digest_and_size(client: Client, tmp_path: Path) -> None:
    farm, name = client(), digest_of(b"true")
    start = pb.FilePiece(start=pb.FileStart(digest=name, size=4))
    for pieces in (
        [start, pb.FilePiece(data=b"lies")],
        [start, pb.FilePiece(data=b"tr")],
        [start, pb.FilePiece(data=b"true and more")],
        [pb.FilePiece(data=b"true")],
        [pb.FilePiece(start=pb.FileStart(digest="../../up", size=4)), pb.FilePiece(data=b"true")],
        [pb.FilePiece(start=pb.FileStart(digest=name, size=1 << 62))],
        [pb.FilePiece()],
    ):
        assert isinstance(translate_grpc_error(upload(farm, *pieces)), UsageError)
    with pytest.raises(FarmError, match=r"blake3.* not found in the farm's store"):
        farm.download(name, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_broken_upload_preserves_complete_files(client: Client, tmp_path: Path, farm_db: str) -> None:
    farm = client()
    first, second = digest_of(b"first"), digest_of(b"second")
    pieces = [pb.FilePiece(start=pb.FileStart(digest=first, size=5)), pb.FilePiece(data=b"first")]
    upload(farm, *pieces, pb.FilePiece(start=pb.FileStart(digest=second, size=6)), pb.FilePiece(data=b"other!"))
    assert rows(farm_db, "select digest, size from hil.artifacts") == [{"digest": first, "size": 5}]
    assert farm.upload({**files_of(tmp_path, b"first", b"second")}) == 6


def test_gc_deletes_unreferenced_files(
    client: Client, board: BareBoard, gateway: Running, tmp_path: Path, farm_db: str
) -> None:
    farm = client()
    files = files_of(tmp_path, b"model", b"trace", b"unused")
    farm.upload(files)
    model, trace, unused = files
    _, [job] = farm.submit(simple_order(specs=(JobSpec(Kind.RUN, files={"model.onnx": model}),)))
    board.report(board.send_grant(), JobResult(0, "PASS", files={"trace.json": trace}))
    assert farm.do("gc").counts["artifacts"] == 0  # all files are new
    rows(farm_db, "update hil.artifacts set used_at = used_at - interval '2 days' returning digest")
    assert farm.do("gc", dry_run=True).bytes == 6
    assert gateway.gateway is not None
    store = gateway.gateway.context.store
    assert store.list_missing(files) == []
    assert farm.do("gc").counts["artifacts"] == 1
    assert store.list_missing(files) == [unused]
    assert farm.do("gc", days=0).counts["jobs"] >= 1
    assert store.list_missing(files) == [model, trace, unused]
    with pytest.raises(UsageError):
        farm.ask("job", name=job)
