"""All connections to an agent. The contract tests run over each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from google.protobuf.json_format import MessageToDict
from support.agents import ADD_MLIR, Program, compile_for_chip, compile_for_device, save_add
from support.links import AGENTS, MICROCONTROLLERS, Reached, reach
from support.microcontrollers import CHIPS
from support.vulkan import NO_VULKAN

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.deploy.wheels import fetch_iree_tool
from hil.controller.storage.cache import Cache
from hil.core.files import digest_file
from hil.formats.iree_devices import find_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove impossible combinations: only microcontrollers run firmware, and microcontrollers run only firmware."""
    items[:] = filter(_has_runtime, items)


def _has_runtime(item: pytest.Item) -> bool:
    chosen = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    runtime = chosen.get("add") or chosen.get("decoder")
    return runtime is None or (runtime == "mcu") == (chosen.get("reached") in CHIPS)


@pytest.fixture(scope="session", params=[*AGENTS, *MICROCONTROLLERS])
def reached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reached]:
    """Yield an agent: in process, over loopback TCP, as a simulator on a Unix socket, on a board over SSH, or of a
    microcontroller.
    """
    with reach(request.param, tmp_path_factory.mktemp("agent"), request) as found:
        yield found


@pytest.fixture
def address(reached: Reached) -> str:
    return reached.address


@pytest.fixture(params=["iree", "onnxruntime", "mcu", pytest.param("iree_vulkan", marks=pytest.mark.slow)])
def add(
    request: pytest.FixtureRequest, reached: Reached, add_programs_for: Callable[..., dict[str, Program]]
) -> Program:
    """Return a program that adds two tensors of 4096 float32, for the agent's architecture, GPU or chip."""
    if request.param == "mcu":
        return request.getfixturevalue("add_firmware")
    if request.param == "iree_vulkan":
        return request.getfixturevalue("add_on_vulkan")
    return add_programs_for(reached.arch)[request.param]


@pytest.fixture(scope="session")
def add_on_vulkan(reached: Reached, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Return the program for the agent's Vulkan device. Skip the test without such a device."""
    client = AgentClient(AgentEndpoint(reached.address), "contract")
    runtimes = MessageToDict(client.describe(), preserving_proto_field_name=True)["runtimes"]
    client.close()
    details = find_device(runtimes, "iree", "vulkan")
    if details is None:
        pytest.skip(f"the agent has {NO_VULKAN}")
    folder = tmp_path_factory.mktemp("vulkan")
    (folder / "add.mlir").write_text(ADD_MLIR)
    return compile_for_device(folder / "add.mlir", "vulkan", details, folder / "add.vmfb")


@pytest.fixture(scope="session")
def add_firmware(reached: Reached, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Return the program for the agent's microcontroller."""
    folder = tmp_path_factory.mktemp("add")
    assert reached.firmware is not None
    return compile_for_chip(save_add(folder / "add.onnx"), reached.firmware, folder / "program")


@pytest.fixture
def connect(address: str) -> Iterator[Callable[[], AgentClient]]:
    """Yield a function that creates clients of the agent. They are closed at the end."""
    clients: list[AgentClient] = []

    def make() -> AgentClient:
        clients.append(AgentClient(AgentEndpoint(address), "contract"))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Callable[[], AgentClient]) -> AgentClient:
    """Return a client with an open session."""
    made = connect()
    made.open_session("contract test", wait_s=10, on_wait=print)
    return made


@pytest.fixture
def profiler(reached: Reached) -> Callable[[AgentClient, str], str]:
    """Return a function that pushes the profiling tool of a runtime. It returns its digest, or "" if none is needed."""

    def push(client: AgentClient, runtime: str) -> str:
        shown = next(one for one in client.describe().runtimes if one.name == runtime)
        if not shown.profile_tool:
            return ""
        path = fetch_iree_tool(shown.profile_tool, reached.arch, version=shown.version, cache=Cache(), board="contract")
        digest = digest_file(path)
        client.put({name: (path, have) for name, have in client.missing([digest]).items()})
        return digest

    return push
