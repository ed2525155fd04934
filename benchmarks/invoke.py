"""Measure a warm call of the agent with 16 KB in and 16 KB out (4096 float32), relative to TVM RPC and a gRPC echo.

The time includes all hops: client, Unix socket, agent, shared memory, worker, runtime, and back. TVM RPC does the same
work over loopback TCP: set the input, call, get the output. The echo only returns the same 16 KB in a bidirectional
stream of raw bytes, also on a Unix socket.
"""

from __future__ import annotations

import queue
import sys

import grpc
import numpy as np

from benchmarks import common

COUNT = 4096
ADD_ONE = """
func.func @main(%x: tensor<4096xf32>) -> tensor<4096xf32> {
  %one = arith.constant dense<1.0> : tensor<4096xf32>
  %y = arith.addf %x, %one : tensor<4096xf32>
  return %y : tensor<4096xf32>
}
"""


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, rounds=15, calls=200)
    notes: list[str] = []
    bare = [sys.executable, str(common.HERE / "bare_peer.py"), "1024"]
    with common.session() as (client, _, folder), common.peer(bare) as peer, common.tvm_peer(notes) as tvm:
        (folder / "add.mlir").write_text(ADD_ONE)
        loaded = common.load(client, common.compile_mlir(folder / "add.mlir"), device="local-sync")
        x = np.arange(COUNT, dtype=np.float32)
        name = loaded.inputs[0].name
        busy: list[int] = []

        def invoke() -> None:
            result = client.invoke(loaded.program_id, {name: x})
            busy.append(common.busy_ns(result))

        assert (next(iter(client.invoke(loaded.program_id, {name: x}).outputs.values())) == x + 1).all()
        channel = grpc.insecure_channel(peer.hello["echo"])
        asks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        replies = channel.stream_stream("/bare/Echo")(iter(asks.get, None))
        payload = x.tobytes()

        def echo() -> None:
            asks.put(payload)
            next(replies)

        cases = {"hil": lambda: common.timed(invoke, asked.calls), "echo": lambda: common.timed(echo, asked.calls)}
        if tvm:
            cases["tvm"] = lambda: tvm(op="invoke", count=asked.calls)
        got = common.interleave(cases, asked.rounds)
        asks.put(None)
        channel.close()
    notes.append(f"on the board between last input byte and first output byte: {np.median(busy) / 1e3:.0f} us (p50)")
    notes.append("each figure is the median over rounds of a round's p50; program on IREE local-sync")
    case = "warm invoke, 16 KB in, 16 KB out, p50"
    rows = [common.beside(case, got["hil"], "bare gRPC echo", got["echo"], 1e6, "us", "<= 1.4")]
    if tvm:
        rows.append(common.beside(case, got["hil"], "TVM RPC", got["tvm"], 1e6, "us", "<= 0.7"))
    common.show("invoke", rows, notes, as_json=asked.json)


if __name__ == "__main__":
    main()
