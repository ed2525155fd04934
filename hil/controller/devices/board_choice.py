"""Selection of a board, the purpose of opening it, and the compile target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hil.controller.devices.board_client import BoardClient
from hil.core.arithmetic import is_arithmetic_flag
from hil.core.board_config import BoardConfig
from hil.core.field_types import is_a
from hil.core.guarded import call_with_time_limit, find_package, guard
from hil.core.installed import list_entry_points
from hil.core.named import resolve
from hil.core.runtimes import TARGET_GROUP, RuntimeInfo, list_known_runtimes
from hil.core.text import TextSink
from hil.errors import UsageError
from hil.formats.iree_devices import find_device, get_driver

if TYPE_CHECKING:
    from hil.controller.backends.targets import Target

PROVIDERS = "hil.board_providers"
TARGET_SECONDS = 60.0


@dataclass(frozen=True)
class BoardChoice:
    """Selected board and the options for opening it."""

    config: BoardConfig
    address: str = ""  # value of ``--board``; "" to use the config's address
    alias: str = ""  # the user's name of the board, if it is a host of the ssh config instead of a board config
    faults: tuple[str, ...] = ()
    runtime: str = ""  # runtime to use; "" for the config's runtime
    purpose: str = ""  # shown to other users who wait for the board
    wait_s: float = 60.0  # how long to wait while another session holds the board, in seconds
    timeout_s: float = TARGET_SECONDS  # time limit in seconds for the package function that chooses the target
    say: TextSink = lambda text: None
    without_agent: str = ""  # why the board is used without an agent; "" if it has an agent
    # Return the client of a link that is already open. The argument is the board's name for errors. None: open a link.
    connect: Callable[[str], BoardClient] | None = None

    @property
    def name(self) -> str:
        """Name of the board in results and errors."""
        return self.address or self.config.name

    @property
    def alias_note(self) -> str:
        """Text for the user that the board is a host of the ssh config, or ""."""
        return f"board {self.alias} is a host of ~/.ssh/config: using {self.address}" if self.alias else ""

    @property
    def target(self) -> str:
        """Address to connect to; "" if neither the user nor the config gives an address."""
        return self.address or self.config.connection.address


def is_provider_address(address: str) -> bool:
    """Return whether an address selects a board of a board provider.

    The board is known only after the address was opened.
    """
    prefix, colon, _ = address.partition(":")
    return bool(colon) and any(point.name == prefix for point in list_entry_points(PROVIDERS))


def pin_choice(choice: BoardChoice, board: str) -> BoardChoice:
    """Return the choice fixed to the named board, so that reconnecting uses the same board."""
    # Other providers may not accept a board's name as a selector.
    if not choice.config.connection.address.startswith("farm:"):
        return choice
    address = f'farm:name="{board}"'
    connection = replace(choice.config.connection, address=address)
    return replace(choice, config=replace(choice.config, connection=connection), address=address)


def knows_target(config: BoardConfig, runtime: str) -> bool:
    """Return whether a program can be compiled without connecting to the board first.

    ``runtime`` "" means the config's runtime.
    """
    if is_provider_address(config.connection.address):
        return False
    info = list_known_runtimes().get(runtime or config.runtime)
    if info is None or not info.target:
        return True
    # A simulator runs on this machine's CPU.
    here = info.targets_host and config.is_simulator
    # A config may set only the arithmetic. hil then adds the target's flags.
    return here or any(not is_arithmetic_flag(flag) for flag in config.compile_flags.get(info.compiler, ()))


def fill_target(
    config: BoardConfig, runtime: str, info: Mapping[str, Any], timeout_s: float = TARGET_SECONDS
) -> tuple[BoardConfig, str]:
    """Return a config with the compile target filled in, and the target's description.

    The description is "" if the config's flags are used unchanged.

    Args:
        info: the board's description, with the keys of Describe.

    Raises:
        UsageError: there is no target for this board, or a package's function failed or exceeded the time limit.
    """
    if knows_target(config, runtime):
        return config, ""
    found = list_known_runtimes()[runtime or config.runtime]
    device = config.devices.get(found.name, "")
    details = _describe_device(info.get("runtimes", ()), found.name, device)
    machine = {**info["machine"], "device": details} if device else info["machine"]
    target = _choose_target(found, machine, timeout_s)
    own = config.compile_flags.get(found.compiler, ())
    flags = {**config.compile_flags, found.compiler: (*target.flags, *own)}
    return replace(config, compile_flags=flags), target.description


def use_device(choice: BoardChoice, runtime: str, device: str) -> BoardChoice:
    """Return the choice with another device for a runtime.

    The config's compile flags are for the config's device. For another driver, hil chooses the target from the board's
    description, and keeps only the arithmetic.

    Args:
        runtime: "" means the config's runtime.
        device: "" keeps the config's device.
    """
    config = choice.config
    name = runtime or config.runtime
    if not device or config.devices.get(name) == device:
        return choice
    before, after = get_driver(config.devices.get(name, "")), get_driver(device)
    flags = dict(config.compile_flags)
    info = list_known_runtimes().get(name)
    if info is not None and before != after:
        # The arithmetic applies to all devices.
        flags[info.compiler] = tuple(filter(is_arithmetic_flag, flags.get(info.compiler, ())))
    return replace(choice, config=replace(config, devices={**config.devices, name: device}, compile_flags=flags))


def _describe_device(runtimes: Sequence[Mapping[str, Any]], runtime: str, device: str) -> dict[str, Any]:
    """Return the board's description of a device for a target function, with ``missing`` if there is no such device."""
    devices = next((one.get("devices", ()) for one in runtimes if one.get("name") == runtime), ())
    is_missing = bool(devices) and not {device, get_driver(device)} & set(devices)
    return {**(find_device(runtimes, runtime, device) or {}), "id": device, "missing": is_missing}


def _choose_target(info: RuntimeInfo, machine: Mapping[str, Any], timeout_s: float) -> Target:
    """Call the function of the runtime's entry, and check the result of a package."""
    from hil.controller.backends.targets import Target

    if not find_package(TARGET_GROUP, info.name):
        own: Target = resolve(info.target)(machine)
        return own
    with guard("target", TARGET_GROUP, info.name, UsageError, UsageError):
        target: Target = call_with_time_limit(lambda: resolve(info.target)(machine), timeout_s)
        is_a(Target)(target)
    return target
