"""The table of runtimes: entries refer to existing objects, and a new runtime needs only an entry."""

from __future__ import annotations

from importlib.metadata import EntryPoint, requires

import pytest

from hil.agent.runtimes import Runtime, list_runtimes
from hil.controller.backends.targets import Target
from hil.core import runtimes
from hil.core.board_config import BoardConfig, Simulator
from hil.core.named import resolve
from hil.core.runtimes import (
    NO_COMPILER,
    RUNTIMES,
    RuntimeInfo,
    can_load_onnx,
    choose_compiler,
    choose_runtime,
    list_known_runtimes,
)

MACHINE = {"arch": "aarch64", "cpu_parts": ["0x41:0xd03"], "cpu_features": ["fp", "asimd"]}


@pytest.mark.parametrize("info", RUNTIMES.values(), ids=list(RUNTIMES))
def test_runtime_entry_resolves_to_complete_runtime(info: RuntimeInfo) -> None:
    pytest.importorskip(info.package.partition(".")[0] or "hil")
    methods = [name for name in vars(Runtime) if not name.startswith("_")]
    # Microcontrollers have an agent of their own, and are not simulated.
    agent = info.agent or "hil.mcu.runtime:McuRuntime"
    for kind in (resolve(agent), resolve(info.simulator)):
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


class Points:
    """Entry points of installed packages: group -> name -> value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **groups: dict[str, str]) -> None:
        points = {
            f"hil.{group}": [EntryPoint(name, value, f"hil.{group}") for name, value in named.items()]
            for group, named in groups.items()
        }
        monkeypatch.setattr(runtimes, "list_entry_points", lambda group: points.get(group, ()))


def test_package_registers_runtime_with_compiler_and_target(monkeypatch: pytest.MonkeyPatch) -> None:
    Points(
        monkeypatch,
        runtimes={"acme": "acme:Runtime"},
        compilers={"acme": "acme:compile"},
        targets={"acme": "acme:choose", "nonesuch": "acme:choose"},
    )
    known = list_known_runtimes()
    assert list(known) == [*RUNTIMES, "acme"]
    acme = known["acme"]
    assert (acme.agent, acme.compiler, acme.compile, acme.target) == (
        "acme:Runtime",
        "acme",
        "acme:compile",
        "acme:choose",
    )
    assert acme.of_package and acme.from_onnx and not acme.light
    assert choose_compiler("onnx", "acme") == "acme"
    assert can_load_onnx("acme") and not can_load_onnx("tflite") and not can_load_onnx("nonesuch")


def test_package_runtime_without_compiler_loads_model_files(monkeypatch: pytest.MonkeyPatch) -> None:
    Points(monkeypatch, runtimes={"acme": "acme:Runtime"})
    assert choose_compiler("onnx", "acme") == NO_COMPILER
    assert not can_load_onnx("acme")


def test_package_compiler_without_runtime_is_known_on_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    Points(monkeypatch, compilers={"acme": "acme:compile"})
    assert choose_compiler("onnx", "acme") == "acme"
    assert list_known_runtimes()["acme"].agent == ""
    assert "acme" not in list_runtimes()


def test_package_replaces_own_runtime_and_keeps_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    Points(monkeypatch, runtimes={"iree": "fork:Runtime"})
    iree = list_known_runtimes()["iree"]
    assert iree.agent == "fork:Runtime" and iree.compile == RUNTIMES["iree"].compile and not iree.package
    assert list_runtimes()["iree"] == "fork:Runtime"


def test_simulated_boards_have_runtimes_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    Points(monkeypatch, runtimes={"acme": "acme:Runtime"})
    devices = {"iree": "local-task"}
    simulated = BoardConfig("sim", "sim", devices=devices, simulator=Simulator())
    assert simulated.has_runtime("acme") and simulated.has_runtime("iree")
    assert not simulated.has_runtime("tflite") and not simulated.has_runtime("nonesuch")
    assert not BoardConfig("rpi5", "rpi5", devices=devices).has_runtime("acme")
    assert BoardConfig("any", "any").has_runtime("nonesuch")
