"""Fuzzers of what a farm hands on: the files and options of jobs, and a gateway's answers to its clients."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import mutate
from fuzzing.engine import Attempt, Broken, Fuzzer, Tried
from hil.errors import BoardError, UsageError

_FILES = {"model/m.onnx": b"x", "inputs/0-x.npy": b"x", "cases/a.flagfile": b"--input=@../../x.npy\n"}


def _run() -> dict[str, Any]:
    return {
        "needs": "onnxruntime",
        "models": ["model/m.onnx"],
        "inputs": [["x=", "inputs/0-x.npy", ""], ["7"]],
        "expected": None,
        "runtime": "onnxruntime",
        "iterations": 3,
        "rtol": 1e-3,
        "timeout": 60.0,
        "labels": ["a=b"],
        "compile_flags": ["--x"],
        "methods": ["main"],
        "key": "key/k.pub",
        "origin": {"host": "h", "user": "u"},
    }


def _suite() -> dict[str, Any]:
    return {
        "source": "layers",
        "flow": "flow.toml",
        "flow_is_file": True,
        "filters": ["a*"],
        "settings": {"runtime": "iree", "rtol": 1e-3, "iterations": 2},
        "typed": {
            "source": "layers",
            "flow": "sim",
            "filters": [],
            "suite": "s",
            "flow_name": "f",
            "runtime": "iree",
            "expected": None,
        },
        "cases": [["a", "m", "conv", "Conv"], ["b", "m", "", ""]],
    }


def _jobs() -> list[bytes]:
    return [json.dumps(one).encode() for one in (_run(), _suite())]


@contextlib.contextmanager
def _parcels(folder: Path) -> Iterator[Attempt]:
    """Reads a job's options as the host of its board does."""
    from hil.controller.farm.job_files import find_key, rebuild_job, request_of, resolve_inside
    from hil.controller.pipeline.settings.options import Job

    for name, content in _FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    def attempt(data: bytes) -> Tried:
        from hil.controller.farm.rpc import decode_json_object
        from hil.protocol.v1 import farm_pb2 as pb

        options = decode_json_object(pb.Json(text=data), "options")  # as a grant carries them
        kinds = []
        for name, read in (("job", rebuild_job), ("key", find_key), ("suite", request_of)):
            try:
                found = read(options, folder)
                kinds.append(name)
                if isinstance(found, Job):
                    outside = [path for path in found.models if not path.is_relative_to(folder)]
                    if outside or any("/etc/" in text for text in found.inputs):
                        raise Broken(f"a job names files of its host: {outside}")
            except UsageError as error:
                str(error).encode()
                kinds.append(f"{name} {error.message[:30]}")
        with contextlib.suppress(UsageError):
            resolve_inside(folder, data.decode(errors="replace"))
        return Tried(4, tuple(kinds))

    yield attempt


def _rows() -> list[bytes]:
    same = {"suite": "s", "flow": "f", "runtime": "iree"}
    record = {**same, "id": "a", "model": "m", "outcome": "PASS", "ended": "PASS"}
    head = {
        **same,
        "schema": 1,
        "id": "r",
        "source": "s",
        "folder": "/x",
        "boards": ["sim"],
        "board_info": {"sim": {}},
        "command": "",
        "versions": {"onnx": "1"},
        "ids": ["a"],
        "suite_ids": ["a"],
        "expected": None,
        "interrupted": False,
        "started": 1.0,
        "finished": 2.0,
        "exit_code": 0,
        "cases": [record],
    }
    result = {
        "outcome": "PASS",
        "exit_code": 0,
        "reason": "",
        "record": head,
        "files": {"a/b.npy": "blake3:" + "0" * 64},
        "timings": {"run": 1.5},
        "infrastructure": False,
    }
    spec = {"kind": "suite", "options": _suite(), "files": {}, "affinity": "", "title": "t"}
    row = {"name": "1.1", "state": "done", "spec": spec, **result}
    run = {**row, "name": "1.2", "spec": {**spec, "kind": "run", "options": _run()}}
    return [json.dumps([row]).encode(), json.dumps([row, run]).encode(), b"{}", b"[]"]


@contextlib.contextmanager
def _answers(folder: Path) -> Iterator[Attempt]:
    """Reads a gateway's answer as a command that fetches results does."""
    from hil.controller.farm.client.client import FarmClient
    from hil.controller.farm.client.results import fetch_run, merge, read_outcomes
    from hil.protocol.v1 import farm_pb2 as pb

    def attempt(data: bytes) -> Tried:
        client = FarmClient.__new__(FarmClient)
        client._call_with_retry = lambda method, request: pb.Answer(answer=pb.Json(text=data))  # type: ignore[method-assign]
        client.download = lambda digest, *places: None  # type: ignore[method-assign, assignment]
        kinds = []

        def attempted(name: str, work: Any) -> Any:
            try:
                found = work()
                kinds.append(name)
                return found
            except (BoardError, UsageError) as error:
                str(error).encode()
                kinds.append(f"{name} {type(error).__name__} {error.message[:30]}")
                return None

        attempted("ask", lambda: client.ask("jobs"))
        ended = attempted("outcomes", lambda: read_outcomes(client, "1"))
        for one in ended or ():
            attempted("run", lambda one=one: fetch_run(client, one, folder / "run"))
        if ended and len(data) % 4 == 0:  # it writes a suite's reports, which takes long
            attempted("suite", lambda: merge(ended, folder / "suite"))
        left = {path.name for path in folder.iterdir()}
        if not left <= {"run", "suite"}:
            raise Broken(f"fetching wrote {sorted(left)}")
        for name in left:
            shutil.rmtree(folder / name)
        return Tried(2, tuple(kinds))

    yield attempt


def _json(data: bytes, rng: Random) -> bytes:
    return mutate.json_bytes(data, rng)[: 1 << 17]


FUZZERS = [
    Fuzzer("parcels", "options and files of a farm's jobs, on their board's host", _parcels, _jobs, _json),
    Fuzzer("farm-answers", "what a gateway answers to its clients", _answers, _rows, _json, (BoardError, UsageError)),
]
