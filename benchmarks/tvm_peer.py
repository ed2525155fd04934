"""Serve TVM RPC as a rival in a separate environment: a client in this process, and TVM's server in another process.

Reads orders from stdin and prints replies, one JSON document per line. ``{"op": "invoke", "count": N}`` -> seconds of N
calls; ``{"op": "bulk", "bytes": N}`` -> [seconds to the server, seconds back].
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tvm
from tvm import rpc, te

COUNT = 4096


def library(folder: Path) -> Path:
    """Compile y = x + 1 for 4096 float32 values. Return the library."""
    x = te.placeholder((COUNT,), name="x")
    y = te.compute((COUNT,), lambda i: x[i] + 1.0, name="y")
    path = folder / "add.so"
    function = te.create_prim_func([x, y]).with_attr("global_symbol", "add")
    tvm.compile(function, target="llvm").export_library(str(path))
    return path


def main() -> None:
    """Serve orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of TVM must not look like a reply
    server = rpc.Server("127.0.0.1", port=19090, port_end=19990, silent=True)
    with tempfile.TemporaryDirectory() as scratch:
        remote = rpc.connect("127.0.0.1", server.port)
        device = remote.cpu(0)
        remote.upload(str(library(Path(scratch))))
        add = remote.load_module("add.so")["add"]
        given = np.arange(COUNT, dtype=np.float32)
        x = tvm.runtime.empty((COUNT,), "float32", device)
        y = tvm.runtime.empty((COUNT,), "float32", device)

        def invoke(count: int) -> list:
            taken = []
            for _ in range(count):
                start = time.perf_counter()
                x.copyfrom(given)
                add(x, y)
                result = y.numpy()
                taken.append(time.perf_counter() - start)
            assert (result == given + 1).all()
            return taken

        def bulk(size: int) -> list:
            data = np.arange(size // 4, dtype=np.float32)
            there = tvm.runtime.empty(data.shape, "float32", device)
            marks = [time.perf_counter()]
            there.copyfrom(data)
            marks.append(time.perf_counter())
            back = there.numpy()
            marks.append(time.perf_counter())
            assert (back == data).all()
            return [marks[1] - marks[0], marks[2] - marks[1]]

        print(json.dumps({"tvm": tvm.__version__}), file=answers, flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            said = invoke(order["count"]) if order["op"] == "invoke" else bulk(order["bytes"])
            print(json.dumps(said), file=answers, flush=True)
    server.terminate()
    os._exit(0)  # exit despite TVM's threads


if __name__ == "__main__":
    main()
