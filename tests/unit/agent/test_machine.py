"""What the agent reads about its board, from a fake root directory and from this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hil.agent import machine as machine_module
from hil.agent.machine import collect_readings, count_oom_kills, describe_machine, get_board_id, get_memory_limit


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def shown(root: Path) -> dict[str, tuple[float | str, str]]:
    return {one.name: (one.text or one.value, one.unit) for one in collect_readings(root)}


POLICY = "sys/devices/system/cpu/cpufreq/policy"
THERMAL = "sys/class/thermal/"


def test_machine_readings_include_clocks_and_temperatures(tmp_path):
    root = lay(
        tmp_path,
        {
            f"{POLICY}0/scaling_cur_freq": "600000\n",
            f"{POLICY}0/scaling_max_freq": "1416000\n",
            f"{POLICY}0/scaling_governor": "schedutil\n",
            f"{POLICY}4/scaling_cur_freq": "1800000\n",
            f"{THERMAL}thermal_zone0/temp": "51250\n",
            f"{THERMAL}thermal_zone0/type": "soc-thermal\n",
            "proc/meminfo": "MemTotal:  1000 kB\nMemAvailable:   524288 kB\n",
        },
    )
    assert shown(root) == {
        "cpu0 frequency": (600.0, "MHz"),
        "cpu0 highest frequency": (1416.0, "MHz"),
        "cpu0 governor": ("schedutil", ""),
        "cpu4 frequency": (1800.0, "MHz"),
        "thermal_zone0 (soc-thermal)": (51.25, "degC"),
        "free memory": (512.0, "MiB"),
    }


def test_machine_readings_include_throttling(tmp_path):
    root = lay(
        tmp_path,
        {
            "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "2\n",
            "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "1\n",
            "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "4\n",
            "sys/devices/platform/soc/soc:firmware/get_throttled": "50005\n",
            f"{THERMAL}cooling_device0/type": "thermal-cpufreq-0\n",
            f"{THERMAL}cooling_device0/cur_state": "0\n",
            f"{THERMAL}cooling_device1/type": "pwm-fan\n",
            f"{THERMAL}cooling_device1/cur_state": "3\n",
        },
    )
    assert shown(root) == {
        "throttle events": (7.0, ""),
        "firmware throttling": ("50005", ""),
        "cooling_device0 (thermal-cpufreq-0)": (0.0, ""),
    }


def test_machine_readings_omit_unreadable_values(tmp_path):
    root = lay(
        tmp_path,
        {
            f"{POLICY}0/scaling_cur_freq": "<unknown>\n",
            f"{POLICY}0/scaling_governor": "\n",
            f"{THERMAL}thermal_zone0/type": "no temperature\n",
            f"{THERMAL}thermal_zone1/temp": "\n",
            "sys/devices/platform/soc/soc:firmware/get_throttled": "",
            "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "",
            "proc/meminfo": "",
        },
    )
    assert shown(root) == {}


def test_machine_describes_this_host():
    known = describe_machine()
    assert known.arch
    assert known.kernel
    assert known.cores >= 1
    assert get_board_id()
    if sys.platform == "linux":
        assert known.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert known.cpu_features
        assert {one.name: one for one in collect_readings()}["free memory"].value > 0


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/a/b", {"sys/fs/cgroup/a/memory.max": "5000"}, 5000),
        ("0::/a/b", {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/memory.max": "7000"}, 7000),
        ("1:cpu:/x\n4:cpuset,memory:/host/path", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "6000"}, 6000),
        ("0::/", {"sys/fs/cgroup/memory.max": str(1 << 62)}, 1 << 40),
        ("nonsense\n::", {}, 1 << 40),
    ],
)
def test_memory_limit_uses_control_group(tmp_path, monkeypatch, groups, files, limit):
    monkeypatch.setattr(machine_module, "get_memory_bytes", lambda: 1 << 40)
    for name, text in ({"proc/self/cgroup": groups} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert get_memory_limit(tmp_path) == limit


@pytest.mark.parametrize(
    ("vmstat", "count"),
    [(b"pgfault 5\noom_kill 7\nswap_ra 9\n", 7), (b"drop_oom_kill 5\noom_kill_all 6\n", 0), (b"", 0)],
)
def test_oom_kills_reads_vmstat_count(monkeypatch, vmstat, count):
    monkeypatch.setattr(machine_module, "_read_bytes", {Path("/proc/vmstat"): vmstat}.__getitem__)
    assert count_oom_kills() == count
