"""Read the parts of the stack that Linux shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.agent.stack import collect_stack


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "sys/class/dmi/id/bios_version": "1.17.2\n",
        "sys/module/nvidia/version": "550.54\n",
        "sys/module/hailo_pci/version": "4.17.0\n",
        "sys/module/usbcore/version": "1\n",
        "sys/class/devfreq/dmc/min_freq": "528000000",
        "sys/class/devfreq/dmc/max_freq": "2112000000",
        "sys/class/devfreq/dmc/governor": "performance",
        "sys/class/devfreq/fb000000.gpu/min_freq": "300000000",
        "sys/class/devfreq/fb000000.gpu/max_freq": "1000000000",
        "proc/cpuinfo": "processor\t: 0\nmicrocode\t: 0xf4\n\nprocessor\t: 1\nmicrocode\t: 0xf4\n",
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:01:00.0/device": "0x2684",
        "sys/bus/pci/devices/0000:01:00.0/current_link_speed": "16.0 GT/s PCIe",
        "sys/bus/pci/devices/0000:01:00.0/current_link_width": "8",
        "sys/bus/usb/devices/1-1/idVendor": "1a6e",
        "sys/bus/usb/devices/1-1/idProduct": "089a",
        "sys/bus/usb/devices/1-1/speed": "5000",
        "sys/bus/usb/devices/1-0:1.0/interface": "x",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_stack_contains_versions_clocks_and_devices(root: Path) -> None:
    assert {one.name: one.version for one in collect_stack(root)} == {
        "firmware": "1.17.2",
        "driver": "hailo_pci 4.17.0, nvidia 550.54",
        "microcode": "0xf4",
        "ddr clock": "dmc 528 to 2112 MHz performance",
        "accelerator clock": "fb000000.gpu 300 to 1000 MHz",
        "pci": "0000:01:00.0 10de:2684 16.0 GT/s x8",
        "usb": "1-1 1a6e:089a 5000 Mbit/s",
    }


def test_stack_without_files_is_empty(tmp_path: Path) -> None:
    assert collect_stack(tmp_path) == ()


def test_stack_escapes_control_characters(tmp_path: Path) -> None:
    file = tmp_path / "sys/class/dmi/id/bios_version"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"1.\x1b[2J7\xff\n")
    (part,) = collect_stack(tmp_path)
    assert part.version.isprintable()
