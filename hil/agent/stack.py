"""Read the parts of the board's stack that Linux shows: firmware, drivers, microcode, clocks, PCI and USB devices."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hil.protocol.v1 import agent_pb2 as pb

_ROOT = Path("/")
# Kernel modules of GPUs and accelerators. A module of the kernel's source has no version of its own.
_DRIVERS = (
    *("amdgpu", "amdxdna", "apex", "etnaviv", "ethosu", "galcore", "gasket", "hailo_pci", "i915", "intel_vpu", "lima"),
    *("mali_kbase", "msm", "nouveau", "nvgpu", "nvidia", "panfrost", "panthor", "powervr", "rknpu", "rocket", "tegra"),
    *("v3d", "vc4", "xe"),
)
_FIRMWARE = (
    "sys/class/dmi/id/bios_version",
    "proc/device-tree/chosen/bootloader/version",
    "proc/device-tree/chosen/u-boot,version",
    "sys/firmware/devicetree/base/chosen/u-boot,version",
)
_MICROCODE = re.compile(r"^microcode\s*:\s*(\S+)", re.M)
_DDR = re.compile(r"dmc|ddr|memory|emc|bus_dram")
_MAX_BYTES = 1 << 16
_MAX_DEVICES = 200
_MAX_TEXT = 2000


@functools.cache
def collect_stack(root: Path = _ROOT) -> tuple[pb.StackPart, ...]:
    """Return the known parts. A part that this machine does not show is missing."""
    found = (
        _read_firmware(root),
        ("driver", _join(_list_drivers(root)), "/sys/module"),
        ("microcode", _find_microcode(root), "/proc/cpuinfo"),
        *_read_clocks(root),
        ("pci", _join(_list_pci(root)), "/sys/bus/pci/devices"),
        ("usb", _join(_list_usb(root)), "/sys/bus/usb/devices"),
    )
    return tuple(pb.StackPart(name=name, version=text, source=source) for name, text, source in found if text)


def _read_firmware(root: Path) -> tuple[str, str, str]:
    for file in _FIRMWARE:
        if text := _read_text(root / file):
            return "firmware", text[:_MAX_TEXT], f"/{file}"
    return "firmware", "", ""


def _list_drivers(root: Path) -> Iterator[str]:
    for name in _DRIVERS:
        folder = root / "sys/module" / name
        if folder.is_dir():
            version = _read_text(folder / "version") or _read_text(folder / "srcversion")
            yield f"{name} {version}".rstrip()


def _find_microcode(root: Path) -> str:
    return _join(dict.fromkeys(_MICROCODE.findall(_read_lines(root / "proc/cpuinfo"))))


def _read_clocks(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the range of frequencies and the governor of the memory and of accelerators, which devfreq controls."""
    clocks: dict[str, list[str]] = {"ddr clock": [], "accelerator clock": []}
    for folder in _list_folders(root / "sys/class/devfreq"):
        low, high = (_read_text(folder / f"{end}_freq") for end in ("min", "max"))
        if low.isdecimal() and high.isdecimal():
            name = "ddr clock" if _DDR.search(folder.name) else "accelerator clock"
            governor = _read_text(folder / "governor")
            text = f"{folder.name} {_format_mhz(low)} to {_format_mhz(high)} MHz {governor}"
            clocks[name].append(text.rstrip())
    for name, texts in clocks.items():
        yield name, _join(texts), "/sys/class/devfreq"


def _format_mhz(hertz: str) -> str:
    return f"{int(hertz[:15]) / 1e6:g}"


def _list_pci(root: Path) -> Iterator[str]:
    for folder in _list_folders(root / "sys/bus/pci/devices"):
        vendor, device = (_read_text(folder / name).removeprefix("0x") for name in ("vendor", "device"))
        if vendor and device:
            speed = _read_text(folder / "current_link_speed").partition(" ")[0]
            width = _read_text(folder / "current_link_width")
            has_link = speed[:1].isdecimal() and width not in ("", "0")
            yield f"{folder.name} {vendor}:{device}" + (f" {speed} GT/s x{width}" if has_link else "")


def _list_usb(root: Path) -> Iterator[str]:
    for folder in _list_folders(root / "sys/bus/usb/devices"):
        vendor, product = (_read_text(folder / name) for name in ("idVendor", "idProduct"))
        if vendor and product:
            speed = _read_text(folder / "speed")
            yield f"{folder.name} {vendor}:{product}" + (f" {speed} Mbit/s" if speed else "")


def _list_folders(folder: Path) -> list[Path]:
    try:
        return sorted(itertools.islice(folder.iterdir(), _MAX_DEVICES))
    except OSError:
        return []


def _join(texts: Iterable[str]) -> str:
    return ", ".join(texts)[:_MAX_TEXT]


def _read_text(path: Path) -> str:
    """Return a file's text in one line; "" if it cannot be read."""
    text = _read_lines(path)
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def _read_lines(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
