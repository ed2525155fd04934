"""`hil board devices`: list the devices that each runtime of a board finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hil.controller.cli.board.options import add_board_place, choose_place
from hil.controller.cli.commands import make_command
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, print_message

if TYPE_CHECKING:
    from hil.controller.records.commands.boards import ListedDevice


@make_command("devices", epilog="Example: hil board devices sim")
@add_board_place
@json_option
def list_devices(as_json: bool, **settings: Any) -> None:
    """List the devices that each runtime of a board finds, with their types.

    Use the name in the column `device` for --device or in [devices] of a board config. A GPU with the type `software`
    is computed by the CPU: its times are not GPU times.
    """
    from hil.controller.pipeline.boards.board_pool import BoardPool
    from hil.controller.records.commands.boards import DeviceList
    from hil.controller.storage.screen.texts import align_rows
    from hil.controller.workloads.board_checks import remove_power_hooks

    choice = choose_place(settings)
    with BoardPool("hil board devices", say=print_message, needs_device=False) as pool:
        runtimes = pool.session(remove_power_hooks(choice)).board.info.get("runtimes", ())
    devices = [device for runtime in runtimes for device in _list_of_runtime(runtime)]
    errors = {one["name"]: one["error"] for one in runtimes if one.get("error")}
    table = [("runtime", "device", "type", "name", "driver"), *map(_format_row, devices)]
    lines = [*align_rows(table, left=len(table[0])), *(f"{name} does not work: {why}" for name, why in errors.items())]
    answer(as_json, DeviceList(board=choice.name, devices=devices, errors=errors), *lines)


def _list_of_runtime(runtime: Mapping[str, Any]) -> Iterator[ListedDevice]:
    """Yield the devices of a runtime, in its order. A name may have multiple devices."""
    from hil.controller.records.commands.boards import ListedDevice
    from hil.formats.iree_devices import get_driver, is_software_gpu

    details = runtime.get("device_details", ())
    for place, name in enumerate(runtime.get("devices", ())):
        matching = [one for one in details if get_driver(one.get("id", "")) == name] or [{"id": name}]
        for number, one in enumerate(matching):
            yield ListedDevice(
                runtime=runtime["name"],
                device=one["id"],
                is_default=place == number == 0,
                name=one.get("name", ""),
                type=one.get("type", ""),
                software=is_software_gpu(one),
                driver=one.get("driver", ""),
                properties=one.get("properties", {}),
            )


def _format_row(device: ListedDevice) -> tuple[str, ...]:
    kind = "software" if device.software else device.type
    return device.runtime, device.device + " (default)" * device.is_default, kind, device.name, device.driver
