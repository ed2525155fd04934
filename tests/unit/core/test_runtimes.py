"""The table of runtimes: entries refer to existing objects, and a new runtime needs only an entry."""

from __future__ import annotations

from importlib.metadata import requires

import pytest

from hil.agent.runtimes import Runtime
from hil.controller.backends.targets import Target
from hil.core.named import resolve
from hil.core.runtimes import NO_COMPILER, RUNTIMES, RuntimeInfo, choose_compiler, choose_runtime

MACHINE = {"arch": "aarch64", "cpu_parts": ["0x41:0xd03"], "cpu_features": ["fp", "asimd"]}


@pytest.mark.parametrize("info", RUNTIMES.values(), ids=list(RUNTIMES))
def test_runtime_entry_resolves_to_complete_runtime(info: RuntimeInfo) -> None:
    pytest.importorskip(info.package.partition(".")[0] or "hil")
    methods = [name for name in vars(Runtime) if not name.startswith("_")]
    for kind in (resolve(info.agent), resolve(info.simulator)):
        assert [name for name in methods if not callable(getattr(kind, name, None))] == []


@pytest.mark.parametrize("info", RUNTIMES.values(), ids=list(RUNTIMES))
def test_runtime_entry_defines_program_creation(info: RuntimeInfo) -> None:
    assert bool(info.compile) == (info.compiler != NO_COMPILER)
    assert info.loads or info.compile
    assert not info.compile or callable(resolve(info.compile))
    if info.target:
        target = resolve(info.target)(MACHINE)
        assert isinstance(target, Target) and target.flags and target.description


def test_runtime_wheels_match_extras() -> None:
    named = {line.split(">")[0].split("<")[0].split("=")[0].strip().lower() for line in requires("hil") or []}
    assert [wheel.name for info in RUNTIMES.values() for wheel in info.wheels if wheel.name not in named] == []
    assert all(bool(info.wheels) == bool(info.package) for info in RUNTIMES.values())


def test_runtime_names_and_exclusive_formats_are_unique() -> None:
    assert [name for name, info in RUNTIMES.items() if name != info.name] == []
    only = [info.loads for info in RUNTIMES.values() if info.only]
    assert only == ["vmfb", "tflite", "pte", "so"]


@pytest.mark.parametrize(
    ("model_format", "wanted", "runtime"),
    [("onnx", "", ""), ("onnx", "onnxruntime", "onnxruntime"), ("vmfb", "", "iree"), ("pte", "vendor", "vendor")],
)
def test_runtime_for_returns_requested_or_exclusive_runtime(model_format: str, wanted: str, runtime: str) -> None:
    assert choose_runtime(model_format, wanted) == runtime


@pytest.mark.parametrize(
    ("model_format", "runtime", "compiler"),
    [
        ("onnx", "iree", "iree"),
        ("vmfb", "iree", "none"),
        ("onnx", "onnxruntime", "none"),
        ("mlir", "onnxruntime", "none"),
        ("pte", "executorch", "none"),
        ("tf", "xla-aot", "tfcompile"),
        ("so", "xla-aot", "none"),
        ("onnx", "vendor", "vendor"),
    ],
)
def test_compiler_for_returns_none_for_compiled_formats(model_format: str, runtime: str, compiler: str) -> None:
    assert choose_compiler(model_format, runtime) == compiler
