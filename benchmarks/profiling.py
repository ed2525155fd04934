"""Measure how much profiling slows down a run.

The benchmark alternates between three kinds of inference of a MobileNetV2-sized model:

- plain,
- watched: with the board's counters read twenty times per second, like `hil run --profile`,
- profiled: the separate pass under the runtime's profiler, from the first operation to the last.

All times are measured on the device. A run without profiling only reads the processor's clock twice.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from benchmarks import common
from benchmarks.model import mobilenet
from hil.controller.analysis.profile.runtimes.iree_profile import read_ireeprof
from hil.controller.pipeline.capture import PERIOD_SECONDS
from hil.controller.storage.isolation.isolated import Isolated


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, rounds=7, calls=10)
    image = np.random.default_rng(1).standard_normal((1, 3, 224, 224), dtype=np.float32)
    with common.session("hil.sim") as (client, _, folder), Isolated(1) as isolated:
        source, compiled = mobilenet(folder / "mobilenet.onnx"), folder / "mobilenet.vmfb"
        arguments = ["compile", str(source), "--runtime-hw-type", "sim", "-o", str(compiled)]
        subprocess.run([sys.executable, "-m", "hil.controller.cli.main", *arguments], check=True, stdout=sys.stderr)
        program = common.load(client, compiled).program_id
        counts = {"warmup": 2, "iterations": asked.calls}

        def plain() -> list[float]:
            stamps = client.invoke(program, {"image": image}, **counts).iterations_ns
            return [(end - start) / 1e6 for start, end in stamps]

        def watched() -> list[float]:
            stream = client.counters(PERIOD_SECONDS)
            threading.Thread(target=lambda: [None for _ in _until_cancelled(stream)], daemon=True).start()
            try:
                return plain()
            finally:
                stream.cancel()

        def profiled() -> list[float]:
            taken = client.profile(program, {"image": image}, **counts)
            with tempfile.TemporaryDirectory() as place:
                raw = Path(place) / "profile.ireeprof"
                raw.write_bytes(taken.files[raw.name])
                given = {"isolated": isolated, "timeout": 60.0, "log": Path(place) / "log"}
                runs: list[list[int]] = [[] for _ in range(asked.calls)]
                for event in read_ireeprof(raw, folder=Path(place), **counts, **given).events():
                    if event.iteration >= 0:
                        runs[event.iteration] += [event.start_ns, event.start_ns + event.duration_ns]
                return [(max(stamps) - min(stamps)) / 1e6 for stamps in runs]

        took = common.interleave({"plain": plain, "watched": watched, "profiled": profiled}, asked.rounds)
    rows = [
        common.Row("inference, plain", statistics.median(took["plain"]), "ms"),
        common.beside("with the counters read beside it", took["watched"], "plain", took["plain"], 1, "ms", "<= 1.02"),
        common.beside("under the profiler", took["profiled"], "plain", took["plain"], 1, "ms", ""),
    ]
    common.show(
        "profiling", rows, ["device time; a ratio is the median of the ratios of all rounds"], as_json=asked.json
    )


def _until_cancelled(stream):
    import grpc

    try:
        yield from stream
    except grpc.RpcError:
        return


if __name__ == "__main__":
    main()
