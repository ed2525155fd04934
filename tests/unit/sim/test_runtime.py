"""A simulated device has the same features as the real runtime."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hil.core.runtimes import RuntimeInfo
from hil.errors import LoadFailed
from hil.sim import runtime
from hil.sim.faults import parse
from hil.sim.references import make_reference
from hil.sim.runtime import SimPackageRuntime, SimProgram, SimRuntime, _make_simulated


def test_sim_program_supports_profile_only_if_runtime_does():
    plain = {"function": "main", "inputs": (), "outputs": ()}
    runtime: Any = SimpleNamespace(profile_fault=lambda: "")
    assert not hasattr(SimProgram(runtime, SimpleNamespace(**plain)), "profile")
    profiled = SimProgram(runtime, SimpleNamespace(**plain, profile=lambda *order: ["out"]))
    assert profiled.profile(1, 2, None, None, None) == ["out"]  # the fake accepts any arguments


@pytest.mark.parametrize(("pace_s", "works_s"), [(0.05, 0.0), (0.05, 0.03), (0.01, 0.03)])
def test_sim_program_run_lasts_at_least_the_pace(pace_s, works_s, monkeypatch):
    def work() -> None:
        end = time.perf_counter() + works_s
        while time.perf_counter() < end:
            pass

    slept: list[float] = []
    # A separate clock: threads left by other tests sleep with the module's clock.
    clock = SimpleNamespace(perf_counter_ns=time.perf_counter_ns, sleep=slept.append)
    monkeypatch.setattr("hil.sim.runtime.time", clock)
    runtime: Any = SimpleNamespace(trigger_at=lambda *at: None, compute_next_factor=lambda: 1.0)
    faults = [parse(f"pace:seconds={pace_s}")]
    start = time.perf_counter()
    SimProgram(runtime, SimpleNamespace(function="main", inputs=(), outputs=(), run=work), faults).run()
    took = time.perf_counter() - start
    assert slept[0] <= max(pace_s - works_s, 0.0) + 1e-6
    assert took + slept[0] >= max(pace_s, works_s) - 1e-6


@pytest.mark.parametrize(("faults", "count"), [("counter:each=10", 1000), ("counter:each=10 slowdown:factor=2", 2000)])
def test_sim_program_counts_by_size_and_slowdown(faults, count):
    program = SimProgram(None, SimpleNamespace(), [parse(fault) for fault in faults.split()], size=100)
    assert [program.count_instructions() for _ in range(2)] == [count, count]
    assert program.instruction_counter == "simulated"


def test_sim_program_varies_counts_by_share():
    program = SimProgram(None, SimpleNamespace(), [parse("counter:each=10,share=0.1")], size=100)
    counts = [program.count_instructions() for _ in range(50)]
    assert len(set(counts)) > 10 and all(900 <= count <= 1100 for count in counts)


def test_sim_program_without_counter_does_not_count():
    assert not hasattr(SimProgram(None, SimpleNamespace(), [], size=100), "count_instructions")


class PackageRuntime:
    """Runtime of a package, which computes in float16."""

    arithmetics = ("float16",)

    def __init__(self, options: dict[str, Any]) -> None:
        self.arithmetic = options.get("arithmetic")

    def load(self, folder: Path, main: str, device: str, function: str) -> Any:
        return SimpleNamespace(function="", inputs=(), outputs=(), arithmetic=self.arithmetic)


@pytest.fixture
def package_runtime(monkeypatch: pytest.MonkeyPatch) -> type[SimRuntime]:
    """Simulated runtime `acme` of a package."""
    info = RuntimeInfo("acme", agent=f"{__name__}:PackageRuntime", of_package=True)
    monkeypatch.setattr("hil.sim.runtime.list_known_runtimes", lambda: {"acme": info})
    monkeypatch.setattr("hil.sim.runtime.resolve", lambda reference: PackageRuntime)
    monkeypatch.setattr("hil.sim.runtime._make_simulated", _make_simulated.__wrapped__)
    found = getattr(runtime, make_reference("acme").partition(":")[2])
    assert issubclass(found, SimPackageRuntime)
    return found


def test_package_runtime_computes_in_boards_arithmetic(package_runtime: type[SimRuntime], tmp_path: Path):
    (tmp_path / "m").write_bytes(b"program")
    options = {"store": str(tmp_path), "arithmetic": "float16"}
    assert package_runtime(options).load(tmp_path, "m", "", "").arithmetic == "float16"
    with pytest.raises(LoadFailed, match="the runtime acme cannot compute in int8 on a simulated board") as raised:
        package_runtime({**options, "arithmetic": "int8"}).load(tmp_path, "m", "", "")
    assert raised.value.hint.startswith("supported: float32, float16;")


@pytest.mark.parametrize("name", ["tflite", "executorch", "xla-aot"])
def test_runtime_refuses_arithmetic_that_simulator_cannot_compute(name: str, tmp_path: Path) -> None:
    kind = type("Sim", (SimRuntime,), {"name": name, "real": PackageRuntime})
    (tmp_path / "m").write_bytes(b"program")
    with pytest.raises(LoadFailed, match=f"the runtime {name} cannot compute in int8 on a simulated board"):
        kind({"store": str(tmp_path), "arithmetic": "int8"}).load(tmp_path, "m", "", "")


def test_reference_needs_known_runtime(package_runtime: type[SimRuntime]):
    for name in ("acme", "runtime.nonesuch"):
        with pytest.raises(AttributeError):
            getattr(runtime, name)
