"""Small programs for agents, and agents and simulators as processes. A pytest plugin for all tests."""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from hil.controller.backends.gpu_targets import choose_gpu_flags
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.core.files import digest_file

ADD_MLIR = """
func.func @main(%a: tensor<4096xf32>, %b: tensor<4096xf32>) -> tensor<4096xf32> {
  %0 = arith.addf %a, %b : tensor<4096xf32>
  return %0 : tensor<4096xf32>
}
"""


@dataclass(frozen=True)
class Program:
    """Compiled program, and the files that it consists of."""

    runtime: str
    path: Path
    digests: dict[str, str] = field(default_factory=dict)
    device: str = ""

    def push(self, client: AgentClient) -> None:
        paths = {digest: self.path.with_name(name) for name, digest in self.digests.items()}
        client.put({digest: (paths[digest], have) for digest, have in client.missing(list(paths)).items()})

    def load(self, client: AgentClient, *, instructions: bool = False, **options: str):
        settings = {"runtime": self.runtime, "device": self.device, "function": "", **options}
        return client.load(self.digests, self.path.name, timeout=120, instructions=instructions, **settings)


def program(runtime: str, path: Path) -> Program:
    return Program(runtime, path, {path.name: digest_file(path)})


def compile_mlir(source: Path, arch: str, output: Path) -> Program:
    """Compile an MLIR program for a CPU of an architecture."""
    flags = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
    if arch == platform.machine():
        flags += ["--iree-llvmcpu-target-cpu=host"]
    else:
        flags += [f"--iree-llvmcpu-target-triple={arch}-unknown-linux-gnu", "--iree-llvmcpu-target-cpu=generic"]
    command = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile", *flags, str(source), "-o", str(output)]
    subprocess.run(command, check=True)
    return program("iree", output)


def compile_for_chip(source: Path, config: Path, folder: Path) -> Program:
    """Compile a model to firmware for the microcontroller of a board config."""
    folder.mkdir()
    command = [sys.executable, "-m", "hil", "compile", str(source), "--board", str(config), "-o"]
    subprocess.run([*command, str(folder / "firmware.json")], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return Program("mcu", folder / "firmware.json", {path.name: digest_file(path) for path in folder.iterdir()})


def compile_for_device(source: Path, device: str, details: Mapping[str, object], output: Path) -> Program:
    """Compile an MLIR program for a GPU, from the agent's description of the device."""
    flags, _ = choose_gpu_flags(device, details)
    command = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile", *flags, str(source), "-o", str(output)]
    subprocess.run(command, check=True)
    return replace(program("iree", output), device=device)


def save_add(path: Path) -> Path:
    """Write a model that computes a + b of 4096 float32 values."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4096]) for name in ("a", "b", "sum")]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["sum"])], "add", values[:2], values[2:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.fixture(scope="session")
def add_programs_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Program]]:
    """Return programs for an architecture that compute a + b of 4096 float32 values, one for each runtime."""

    @functools.cache
    def make(arch: str) -> dict[str, Program]:
        folder = tmp_path_factory.mktemp(f"programs-{arch}")
        (folder / "add.mlir").write_text(ADD_MLIR)
        return {
            "iree": compile_mlir(folder / "add.mlir", arch, folder / "add.vmfb"),
            "onnxruntime": program("onnxruntime", save_add(folder / "add.onnx")),
        }

    return make


@pytest.fixture(scope="session")
def add_programs(add_programs_for: Callable[[str], dict[str, Program]]) -> dict[str, Program]:
    """Programs that compute a + b of 4096 float32 values, one for each runtime on this machine."""
    return add_programs_for(platform.machine())


@pytest.fixture(params=["iree", "onnxruntime"])
def add(request: pytest.FixtureRequest, add_programs: dict[str, Program]) -> Program:
    return add_programs[request.param]


def start_process(
    module: str, listen: str, store: Path, *more: str, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], str]:
    """Start an agent or simulator as a separate process. Return the process and its address."""
    command = [sys.executable, "-m", module, "--listen", listen, "--store", str(store), "--lifeline", *more]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"{module} did not start"
    return process, json.loads(line)["address"]


@contextlib.contextmanager
def few_files() -> Iterator[None]:
    """Limit the number of open files: processes that start in this block have a soft limit slightly above this
    process's use.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, own + 64), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def stop_process(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin and process.stdout
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Start an agent (or a simulator, with ``module="hil.sim"``) on a Unix socket. Return its address."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*more: str, module: str = "hil.agent") -> str:
        number = len(processes)
        process, address = start_process(module, f"unix:{tmp_path}/{number}.sock", tmp_path / f"store-{number}", *more)
        processes.append(process)
        return address

    yield start
    for process in processes:
        stop_process(process)


@pytest.fixture
def open_client() -> Iterator[Callable[[str], AgentClient]]:
    """Open clients with a session at an address. The fixture closes them at the end."""
    clients: list[AgentClient] = []

    def make(address: str) -> AgentClient:
        client = AgentClient(AgentEndpoint(address), "test")
        clients.append(client)
        client.describe()
        client.open_session("test", wait_s=60, on_wait=print)
        return client

    yield make
    for client in clients:
        client.close()
