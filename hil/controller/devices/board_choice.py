"""Selection of a board, the purpose of opening it, and the compile target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hil.controller.backends.gpu_targets import TARGETED_DRIVERS, describe_target_flag, name_target
from hil.controller.devices.board_client import BoardClient
from hil.core.arithmetic import is_arithmetic_flag
from hil.core.board_config import BoardConfig
from hil.core.field_types import is_a
from hil.core.guarded import call_with_time_limit, find_package, guard
from hil.core.installed import list_entry_points
from hil.core.mcu_config import MCU_RUNTIME
from hil.core.named import resolve
from hil.core.runtimes import TARGET_GROUP, RuntimeInfo, list_known_runtimes
from hil.core.text import TextSink
from hil.errors import BoardUnfit, UsageError, did_you_mean
from hil.formats.iree_devices import CPU_DRIVERS, find_device, get_driver, list_devices, match_devices

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
    # (runtime, device) that the user selected instead of the config's device, for a board that a provider chooses.
    used_device: tuple[str, str] = ("", "")
    without_agent: str = ""  # why the board is used without an agent; "" if it has an agent
    # Return the client of a link that is already open. The argument is the board's name for errors. None: open a link.
    connect: Callable[[str], BoardClient] | None = None

    @property
    def name(self) -> str:
        """Name of the board in results and errors."""
        return self.address or self.config.name

    @property
    def devices(self) -> tuple[tuple[str, str], ...]:
        """The runtimes with a selected device, and their devices. A connection uses these devices for all programs."""
        return tuple(sorted(self.config.devices.items()))

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

    The description is "" if the config's flags are used unchanged, and if the board lacks the device of the config.

    Args:
        info: the board's description, with the keys of Describe.

    Raises:
        UsageError: there is no target for this board, or a package's function failed or exceeded the time limit.
    """
    if knows_target(config, runtime):
        return config, ""
    found = list_known_runtimes()[runtime or config.runtime]
    if [one.get("name") for one in info.get("runtimes", ())] == [MCU_RUNTIME]:
        raise make_mcu_runtime_error(config.name, found.name)
    device = config.devices.get(found.name, "")
    details = _describe_device(info.get("runtimes", ()), found.name, device)
    if device and details["missing"]:  # commands that need the device call refuse_missing_device
        return config, ""
    machine = {**info["machine"], "device": details} if device else info["machine"]
    target = _choose_target(found, machine, timeout_s)
    own = config.compile_flags.get(found.compiler, ())
    flags = {**config.compile_flags, found.compiler: (*target.flags, *own)}
    return replace(config, compile_flags=flags), target.description


def use_named_target(config: BoardConfig, runtime: str, flags: Sequence[str]) -> BoardConfig:
    """Return the config for a GPU whose target is in the user's compile flags.

    A command that only compiles then does not need a board with this GPU.
    """
    name = runtime or config.runtime
    info, named = list_known_runtimes().get(name), name_target(config.devices.get(name, ""), flags)
    if info is None or not named or knows_target(config, runtime):
        return config
    own = config.compile_flags.get(info.compiler, ())
    return replace(config, compile_flags={**config.compile_flags, info.compiler: (*named, *own)})


def use_device(choice: BoardChoice, runtime: str, device: str) -> BoardChoice:
    """Return the choice with another device for a runtime.

    The config's compile flags are for the config's device. For another device, hil chooses the target from the board's
    description, and keeps only the arithmetic. Only for GPUs, devices of the same driver have different targets.

    Args:
        runtime: "" means the config's runtime.
        device: "" keeps the config's device.
    """
    config = choice.config
    name = runtime or config.runtime
    before = config.devices.get(name, "")
    if not device or before == device:
        return choice
    choice = replace(choice, used_device=(runtime, device))
    flags = dict(config.compile_flags)
    info = list_known_runtimes().get(name)
    is_same_target = get_driver(before) == get_driver(device) and get_driver(device) not in TARGETED_DRIVERS
    # A config's chip stays the same for each device.
    if info is not None and not is_same_target and not (config.mcu is not None and name == MCU_RUNTIME):
        # The arithmetic applies to all devices.
        flags[info.compiler] = tuple(filter(is_arithmetic_flag, flags.get(info.compiler, ())))
    return replace(choice, config=replace(config, devices={**config.devices, name: device}, compile_flags=flags))


def refuse_missing_device(config: BoardConfig, runtime: str, info: Mapping[str, Any], board: str) -> None:
    """Raise an error if a program must be compiled for a device that the board lacks.

    Args:
        runtime: "" means the config's runtime.
        info: the board's description, with the keys of Describe.
        board: the board's name, for the error.

    Raises:
        BoardUnfit: the board lacks the device.
        UsageError: the device's name is ambiguous.
    """
    name = runtime or config.runtime
    known, runtimes = list_known_runtimes().get(name), info.get("runtimes", ())
    wanted = config.devices.get(name, "")
    if known is None or not wanted or not (known.target or name == MCU_RUNTIME):
        return
    details = list_devices(runtimes, name)
    found = match_devices(details, wanted)
    if len(found) > 1:
        raise UsageError(
            f"device name {wanted!r} is ambiguous on board {board!r}: it selects "
            f"{' and '.join(str(one['id']) for one in found)}",
            hint="use the name in the column 'device' of hil board devices",
        )
    if not _describe_device(runtimes, name, wanted)["missing"]:
        return
    devices = [str(one["id"]) for one in details] or _list_drivers(runtimes, name)
    then = f"; check that the device's driver is installed on the board{_describe_compile_only(wanted)}"
    if name == MCU_RUNTIME:
        then = ""  # a microcontroller has no drivers
    raise BoardUnfit(
        f"board {board!r} has no device {wanted!r} for the runtime {name}",
        board=board,
        hint=f"{did_you_mean(wanted, [*devices, *_list_drivers(runtimes, name)])}devices found: "
        f"{', '.join(devices)}{then}",
    )


def make_mcu_runtime_error(board: str, runtime: str) -> UsageError:
    """Return the error for a microcontroller and another runtime than its firmware."""
    return UsageError(
        f"board {board} is a microcontroller and has only the runtime {MCU_RUNTIME}, not {runtime}",
        hint=f"use --runtime {MCU_RUNTIME}, or another board",
        option="--runtime",
    )


def _describe_device(runtimes: Sequence[Mapping[str, Any]], runtime: str, device: str) -> dict[str, Any]:
    """Return the board's description of a device for a target function, with ``missing`` if there is no such device."""
    drivers, driver = _list_drivers(runtimes, runtime), get_driver(device)
    found = find_device(runtimes, runtime, device)
    # A board with an older agent, or a driver of a package, does not describe its devices.
    is_described = any(get_driver(str(one.get("id", ""))) == driver for one in list_devices(runtimes, runtime))
    is_unknown = bool(drivers) and not {device, driver} & set(drivers)
    is_missing = is_unknown or (found is None and is_described and driver not in CPU_DRIVERS)
    return {**(found or {}), "id": device, "missing": is_missing}


def _describe_compile_only(device: str) -> str:
    flag = describe_target_flag(device)
    return f"; hil compile needs no device with --compile-flag={flag}" if flag else ""


def _list_drivers(runtimes: Sequence[Mapping[str, Any]], runtime: str) -> Sequence[str]:
    return next((one.get("devices", ()) for one in runtimes if one.get("name") == runtime), ())


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
