"""Measure 128 MiB to and from preallocated memory and to disk, relative to a loopback socket and TVM RPC.

Tensors are part of a whole call. The receiver verifies them by digest, and outputs go into an existing array. The
result is the cost of moving the bytes: the call's wall time without the time on the board between the last input byte
and the first output byte (``common.busy_ns``), in which the program runs. The raw socket uses memory that was touched
before, and verifies nothing.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import common
from benchmarks.bare_peer import ORDER, receive_into
from hil.core.files import digest_file

SIZE = 128 << 20
COUNT = SIZE // 4
TVM_SIZE = 16 << 20


def models(folder: Path) -> tuple[Path, Path]:
    """Write two models: 32M float32 values in and one value out; one value in and 32M copies out."""
    big = helper.make_tensor_value_info("x", TensorProto.FLOAT, [COUNT])
    one = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    last = helper.make_tensor("last", TensorProto.INT64, [1], [COUNT - 1])
    take = helper.make_graph([helper.make_node("Gather", ["x", "last"], ["y"])], "take", [big], [one], [last])
    one = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    big = helper.make_tensor_value_info("y", TensorProto.FLOAT, [COUNT])
    shape = helper.make_tensor("shape", TensorProto.INT64, [1], [COUNT])
    give = helper.make_graph([helper.make_node("Expand", ["x", "shape"], ["y"])], "give", [one], [big], [shape])
    paths = folder / "take.onnx", folder / "give.onnx"
    for graph, path in zip((take, give), paths, strict=True):
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return paths


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, rounds=7)
    notes: list[str] = []
    bare = [sys.executable, str(common.HERE / "bare_peer.py"), str(SIZE)]
    with common.session() as (client, _, folder), common.peer(bare) as peer, common.tvm_peer(notes) as tvm:
        take, give = (common.load(client, path, "onnxruntime") for path in models(folder))
        data = np.random.default_rng(0).random(COUNT, dtype=np.float32)
        into = np.zeros(COUNT, np.float32)
        raw = socket.create_connection(("127.0.0.1", peer.hello["tcp"]))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        view, answer = memoryview(into.view(np.uint8).data), memoryview(bytearray(1))
        turn = 0

        def raw_there() -> list[float]:
            start = time.perf_counter()
            raw.sendall(ORDER.pack(b"s", SIZE))
            raw.sendall(data.data)
            receive_into(raw, answer)
            return [time.perf_counter() - start]

        def raw_back() -> list[float]:
            start = time.perf_counter()
            raw.sendall(ORDER.pack(b"r", SIZE))
            receive_into(raw, view)
            return [time.perf_counter() - start]

        def there() -> list[float]:
            start = time.perf_counter()
            done = client.invoke(take.program_id, {"x": data})
            taken = time.perf_counter() - start - common.busy_ns(done) / 1e9
            assert done.outputs["y"][0] == data[-1]
            return [taken]

        def back() -> list[float]:
            nonlocal turn
            turn += 1
            start = time.perf_counter()
            done = client.invoke(give.program_id, {"x": np.array([turn], np.float32)}, into={"y": into})
            taken = time.perf_counter() - start - common.busy_ns(done) / 1e9
            assert into[0] == into[-1] == turn
            return [taken]

        def write() -> list[float]:
            start = time.perf_counter()
            (folder / "plain").write_bytes(data.data)
            taken = time.perf_counter() - start
            (folder / "plain").unlink()
            return [taken]

        def put() -> list[float]:
            nonlocal turn
            turn += 1
            data[0] = turn
            (folder / "blob").write_bytes(data.data)
            name = digest_file(folder / "blob")
            start = time.perf_counter()
            client.put({name: (folder / "blob", 0)})
            taken = time.perf_counter() - start
            start = time.perf_counter()
            fetched = client.get(name)
            gets.append(time.perf_counter() - start)
            assert (np.frombuffer(fetched, np.float32) == data).all()
            sent = client.payload_bytes_sent
            client.put({one: (folder / "blob", have) for one, have in client.missing([name]).items()})
            again.append(client.payload_bytes_sent - sent)
            next((folder / "store" / "blobs").rglob(name.partition(":")[2])).unlink()
            return [taken]

        gets: list[float] = []
        again: list[int] = []
        cases = {"raw there": raw_there, "there": there, "raw back": raw_back, "back": back, "write": write, "put": put}
        if tvm:
            cases["tvm there"] = lambda: [tvm(op="bulk", bytes=TVM_SIZE)[0] * SIZE / TVM_SIZE]
            cases["tvm back"] = lambda: [tvm(op="bulk", bytes=TVM_SIZE)[1] * SIZE / TVM_SIZE]
        got = common.interleave(cases, asked.rounds)
        raw.close()

    speed = {name: [SIZE / 1e9 / one for one in seconds] for name, seconds in got.items()}
    speed["get"] = [SIZE / 1e9 / one for one in gets[1:]]
    speed["slower"] = [min(pair) for pair in zip(speed["raw there"], speed["write"], strict=True)]
    rows = []
    for case, name in (("to memory on the board", "there"), ("from the board into an array", "back")):
        rows.append(common.beside(case, speed[name], "raw TCP", speed[f"raw {name}"], 1, "GB/s", ">= 0.6"))
        if tvm:
            rows.append(common.beside(case, speed[name], "TVM RPC", speed[f"tvm {name}"], 1, "GB/s", ">= 20"))
    slower = "slower of raw TCP and a plain write"
    for case, name in (("put a file (to the board's disk)", "put"), ("get it (from the board's disk)", "get")):
        rows.append(common.beside(case, speed[name], slower, speed["slower"], 1, "GB/s", ">= 0.9"))
    rows.append(common.Row("payload bytes sent for a blob that the board has", float(max(again)), "bytes", bar="0"))
    notes.append("128 MiB; time on the board between last input byte and first output byte is not counted")
    notes.append(f"TVM RPC is measured with {TVM_SIZE >> 20} MiB; a plain write ends in the page cache, as hil's does")
    common.show("stream", rows, notes, as_json=asked.json)


if __name__ == "__main__":
    main()
