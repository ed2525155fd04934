"""Fuzzers of the texts that hil reads: configurations, flag files, what a board answers, what was stored."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import mutate
from fuzzing.engine import Attempt, Fuzzer, Tried
from fuzzing.files import reader, small_files
from hil.errors import BoardError, LoadFailed, RunFailed, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def toml(data: bytes, rng: Random) -> bytes:
    """Change what a TOML file says, or its text."""
    if rng.random() < 0.5:
        return mutate.lines(data, rng)
    try:
        document = mutate.tree(tomllib.loads(data.decode()), rng)
    except (ValueError, RecursionError):  # no TOML any more
        return mutate.havoc(data, rng)
    if not isinstance(document, dict):
        return mutate.havoc(data, rng)
    tables = {name: value for name, value in document.items() if value and isinstance(value, dict)}
    parts = [*_toml_lines({name: value for name, value in document.items() if name not in tables})]
    for name, table in tables.items():
        parts += [f"[{json.dumps(name, ensure_ascii=False)}]", *_toml_lines(table)]
    return "\n".join(parts).encode("utf-8", "surrogatepass")


def _toml_lines(table: dict[str, Any]) -> Iterator[str]:
    """Write the lines of a table: tomlkit takes most of a fuzzer's time, and checks what it writes."""
    return (f"{json.dumps(name, ensure_ascii=False)} = {_toml_value(value)}" for name, value in table.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(_toml_lines(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool | float) else str(value)


# ---- configurations

_BOARD = b"""
[board]
name = "rpi5"
hw_type = "rpi5"
description = "a board"
[devices]
iree = "local-task"
[compile_flags]
iree = ["--a=b", "--c"]
[labels]
rack = 3
tags = ["a", "b"]
[connection]
address = "root@rpi5:22"
identity = "key"
fence = 7
accept_new_host_key = true
[power]
reset = ["uhubctl", "-a", "cycle"]
settle_s = 3
[labgrid]
place = "x"
[console]
address = "telnet://lab:4001"
boot = "login:"
boot_s = 5
[[console.patterns]]
name = "a"
pattern = "b[0-9]+"
[provision]
command = ["flash", "{image}"]
"""
_SIMULATED = b"""
[board]
hw_type = "sim"
[simulator]
memory_limit = 1000
arithmetic = "f16"
faults = ["crash-at-load"]
"""
_EXPECTED = b"""
[made_with]
onnx = "1.20"
[[compile]]
cases = ["a*", "b"]
outcome = "COMPILE_ERROR"
reason = "x"
[[run]]
cases = ["c"]
outcome = ["FAIL", "TIMEOUT"]
reason = "y"
runtime = "iree"
until = "2030-01-01"
"""
_FLOWS = b"""
[one]
runtime = "iree"
compiler_flags = ["--x"]
rtol = 1e-3
[two]
runtime = "onnxruntime"
recipe = "int8"
settings = { calibration = "minmax" }
quanta = 2
"""
_GENERATION = b"""
steps = 9
chunk = 2
stop = [0]
lengths = [1, 2]
[[prompt]]
name = "a"
tokens = [1, 2, 3]
forced = [4]
[[prompt]]
text = "the board"
[roles]
tokens = "ids"
[roles.cache]
past = "present"
"""


def _read_config(path: Path) -> Tried:
    """A file of TOML, as each of the things that one may be."""
    from hil.controller.farm.settings import load_settings
    from hil.controller.models.flows.flow_registry import read_flows
    from hil.controller.models.generation.roles import detect_roles
    from hil.controller.models.generation.spec import read_spec
    from hil.controller.workloads.suites.expected import Expectations
    from hil.core.board_parser import parse_board
    from hil.core.boards import load_board
    from hil.core.tensors import TensorSpec

    def generate() -> None:
        inputs = [TensorSpec("ids", "int64", (1, "n")), TensorSpec("past", "float32", (1, "p", 4))]
        outputs = [TensorSpec("logits", "float32", (1, "n", 9)), TensorSpec("present", "float32", (1, "t", 4))]
        spec = read_spec(path)
        detect_roles(inputs, outputs, spec).plan.check(2, 2)

    read = {
        "board": lambda: load_board(str(path)),
        "text": lambda: parse_board(path.read_text("utf-8", "replace"), path),
        "terms": lambda: load_settings(path),
        "flows": lambda: read_flows(path),
        "expected": lambda: Expectations.load(path),
        "generation": generate,
    }
    kinds = []
    for name, work in read.items():
        try:
            work()
            kinds.append(name)
        except UsageError as error:
            str(error).encode()
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            kinds.append(f"{name} {trace.tb_lineno if trace else 0}")
    return Tried(len(read), tuple(kinds))


# ---- flag files

_FLAGS = b"""--module=a.vmfb
# a comment
--function=main
--input=4x8xf32=1 2 3
--input=@x.npy
--input=7
--expected_output=2xf32=0.5 1e-3
--expected_f32_threshold=0.1
--parameters=model=a.irpa
--device=local-task
"""
_FLAG_WORDS = [
    b"--input=",
    b"=@",
    b"4294967296xf32",
    b"0x0xi8",
    b"1xi4=1",
    b"complex<f32>",
    b"1x1x1x1xf64=nan",
    b"--equality_mode=exact",
    b"999999999999xf32",
    b"2xi64=0x_1 1_0",
    b"1xi8=300",
    b"i1=true",
    b"--",
    b"99999x99999x99999xf32=1",
]


def _read_flags(path: Path) -> None:
    from hil.controller.backends.references.expected import read_expected
    from hil.controller.models.inputs import make_inputs
    from hil.controller.pipeline.settings.flagfiles import parse_flagfile
    from hil.core.tensors import TensorSpec

    flags = parse_flagfile(path)
    specs = [TensorSpec(f"x{number}", "float32", (None, None)) for number in range(len(flags.inputs))]
    with contextlib.suppress(UsageError):
        make_inputs(specs, [text for text in flags.inputs if _is_small(text)])
    read_expected([text for text in flags.expected if _is_small(text)], None)


def _is_small(text: str) -> bool:
    """Whether a tensor of this text takes little memory: a user who types a large one gets it."""
    import math
    import re

    dims = re.match(r"(?:\d+x)*", text.partition("=")[0].strip())
    sizes = [int(size[:30]) for size in (dims[0] if dims else "").split("x") if size]
    return math.prod(sizes) < 1 << 20


# ---- what a board answers

_PROBE = b"""Welcome to the board
machine\taarch64\tLinux
folder\t/root/.hil
up\t1234\tabc\t/usr/bin/python3
installed\tabc\trecipe\tiree onnxruntime\t/usr/bin/python3\tnumpy-2 grpcio-1
complete
python\t3.11.2\taarch64\tglibc 2.36\t/usr/bin/python3\t
package\tnumpy-2.whl
broken\t/opt/python\tit does not start
free\t1000000
used\t71000
unusable\tit cannot be written
left\t/root/.hil/x\tbusy
busy\t77
stopped\t78
deploying
"""
_CPU = b"""processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU part\t: 0xd0b
processor\t: 1
model name\t: Intel(R) Xeon(R)
flags\t\t: fpu sse2 avx2
MemTotal:        8000000 kB
/sys/class/thermal/thermal_zone0/temp:45000
/sys/class/thermal/thermal_zone0/type:cpu-thermal
/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq:1500000
/proc/meminfo:MemAvailable: 500 kB
/sys/x/cpu0/core_throttle_count:3
"""
_IREE = b"""EXEC @main
result[0]: hal.buffer_view
2xf32=1.5 2
iree/runtime/x.c:12: INVALID_ARGUMENT; the function takes 2 inputs
"""
_BENCH = b'{"benchmarks": [{"run_type": "iteration", "real_time": 1.5, "time_unit": "ms"}, {"run_type": "aggregate"}]}'
_BOARD_WORDS = [
    b"python",
    b"up",
    b"free",
    b"busy",
    b"installed",
    "\u0661\u0662".encode(),
    "²".encode(),
    b"9" * 6000,
    b"-5",
    b"3.\xb2",
    b"0x41",
    b"nan",
    b"inf",
    b"1e400",
    b"\xff\xfe",
    b"\x1b[2J",
    b"\x85",
    b"\xe2\x80\xa8",
]


def _board_says(data: bytes) -> Tried:
    """Everything of hil that reads a board's text, on one text."""
    from hil.controller.devices.agentless import scripts
    from hil.controller.devices.deploy import probe
    from hil.formats.iree_command import read_times_ns

    text = data.decode(errors="replace")
    kinds = []
    seen = probe.parse(text)
    kinds.append(f"probe {sum(bool(value) for value in vars(seen).values())}")
    parts = {"arch": text[:7], "cpuinfo": text, "meminfo": text, "auxv": text}
    kinds.append(f"machine {sorted(scripts.parse_machine(parts))} {len(scripts.parse_readings(text))}")
    json.dumps(scripts.parse_readings(text))
    kinds.append(
        type(
            scripts.make_failure(scripts.CommandEnd("exit", len(data) % 256, 0, (), text), text, "iree-run-module")
        ).__name__
    )
    with contextlib.suppress(ValueError):
        kinds.append(f"times {len(read_times_ns(data))}")
    return Tried(4, tuple(kinds))


# ---- what a program says of itself

_DECLARATIONS = [
    b"sync func @main(%x: tensor<2x?xf32>, %n: i32) -> (%y: tensor<2x?xf32>)",
    b'async func @"a b"(%input0: tensor<4xcomplex<f32>> {iree.x = 1}, %b: !hal.fence) -> (%out: i64)',
    b"0rriI_rf",
    b"0_r",
]
_DECLARATION_WORDS = [
    b"tensor<",
    b"tensor<?x?xf32>",
    b", %",
    b") -> (",
    b"tensor<99999999999999999999x1xf32>",
    b"%: ",
    b"!hal.fence",
    b"tensor<1x1x1x1x1xi4>",
    b"r" * 500,
    b"{",
    b"}",
]


def _declares(data: bytes) -> None:
    from hil.formats.iree_values import Function, choose_function, parse_convention, parse_declaration

    text = data.decode(errors="replace")
    for read in (parse_declaration, parse_convention):
        with contextlib.suppress(LoadFailed):
            read(text)
    import dataclasses

    fields: dict[str, Any] = {one.name: text for one in dataclasses.fields(Function)}
    choose_function({"main": Function(**fields)}, "").make_signature()


# ---- what was stored


def _stored() -> list[bytes]:
    run = {
        "schema": 1,
        "id": "x",
        "created": 1.5,
        "request": {},
        "board": {"name": "sim"},
        "outcome": "PASS",
        "exit_code": 0,
        "finished": True,
        "cases": [
            {
                "name": "a",
                "outcome": "PASS",
                "outputs": [{"name": "y", "dtype": "float32", "shape": [2], "file": "a.npy"}],
            }
        ],
    }
    suite = {
        "schema": 1,
        "suite": "s",
        "flow": "f",
        "ids": ["a", "b"],
        "boards": ["sim"],
        "started": 1.0,
        "finished": 2.0,
        "exit_code": 0,
        "versions": {"onnx": "1"},
        "left_out": ["x"],
    }
    span = {"name": "load", "start_ns": 1, "end_ns": 5}
    profile = {
        "schema": 1,
        "run": "r",
        "model": "m",
        "board": "sim",
        "runtime": "iree",
        "rows": 0,
        "stages": [span],
        "transfers": [span],
        "calls": [],
        "counters": [],
        "clock": {},
        "notes": ["n"],
    }
    golden = {
        "golden": 1,
        "runtime": "none",
        "main": "m",
        "files": ["m"],
        "compiler": "",
        "flags": [],
        "methods": [
            {
                "name": "f",
                "inputs": [{"name": "x", "dtype": "float32", "shape": [2, "N", None]}],
                "outputs": [],
                "cases": [],
            }
        ],
        "made": {},
    }
    tensors = [{"name": "x", "dtype": "float32", "shape": [2], "file": "a.npy"}]
    return [json.dumps(one).encode() for one in (run, suite, profile, golden, tensors)]


@contextlib.contextmanager
def _store(folder: Path) -> Iterator[Attempt]:
    from hil.controller.analysis.profile.store import HEAD, read_profile
    from hil.controller.storage.runs import RunStore
    from hil.controller.storage.tensor_files import INDEX, load_tensors
    from hil.controller.workloads.bundles.case_files import read_golden
    from hil.controller.workloads.suites.reports.results import load_run
    from hil.controller.workloads.suites.store import HEAD as SUITE
    from hil.controller.workloads.suites.store import LINES

    held = folder / "run"
    held.mkdir()
    (held / "program").mkdir()
    (held / "program" / "m").write_bytes(b"x")

    def run() -> None:
        RunStore(folder).list_summaries()
        RunStore(folder).open(str(held))

    readers = {
        "run.json": run,
        SUITE: lambda: load_run(held),
        HEAD: lambda: list(read_profile(held).rows),
        "golden.json": lambda: read_golden(held, context=None),
        INDEX: lambda: load_tensors(held),
    }

    def attempt(data: bytes) -> Tried:
        kinds = []
        (held / LINES).write_bytes(data[: len(data) // 2] + b"\n" + data)
        for name, read in readers.items():
            (held / name).write_bytes(data)
            try:
                read()
                kinds.append(name)
            except (UsageError, LoadFailed, RunFailed) as error:
                str(error).encode()
                kinds.append(f"{name} {str(error).rpartition(': ')[2][:12]}")
            (held / name).unlink()
        return Tried(len(readers), tuple(kinds))

    yield attempt


def _direct(work: Any) -> Any:
    @contextlib.contextmanager
    def opened(_: Path) -> Iterator[Attempt]:
        yield work

    return opened


FUZZERS = [
    Fuzzer(
        "boards",
        "board configurations, and the other files of TOML",
        reader("a.toml", _read_config),
        lambda: [
            _BOARD,
            _SIMULATED,
            _EXPECTED,
            _FLOWS,
            _GENERATION,
            b"[[prompt]]\ntokens = [1, 2]\n[roles]\nlogits = 'logits'\n",
            b"[terms]\nbeat_s = 2\n",
            *small_files("board_configs/*.toml", "hil/**/*.toml", "examples/**/*.toml"),
        ],
        toml,
    ),
    Fuzzer(
        "flagfiles",
        "flag files of IREE's tools",
        reader("a.flagfile", _read_flags),
        lambda: [_FLAGS],
        lambda data, rng: mutate.lines(data, rng, _FLAG_WORDS),
    ),
    Fuzzer(
        "probe",
        "what a board answers over SSH",
        _direct(_board_says),
        lambda: [_PROBE, _CPU, _IREE, _BENCH],
        lambda data, rng: (
            mutate.json_bytes if data[:1] == b"{" else lambda data, rng: mutate.lines(data, rng, _BOARD_WORDS)
        )(data, rng),
        (BoardError,),
    ),
    Fuzzer(
        "declarations",
        "what a program of IREE says of its functions",
        _direct(_declares),
        lambda: _DECLARATIONS,
        lambda data, rng: mutate.lines(data, rng, _DECLARATION_WORDS),
        (LoadFailed,),
    ),
    Fuzzer("stored", "what runs, suites, profiles and golden folders hold", _store, _stored, mutate.json_bytes),
]
