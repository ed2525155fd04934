"""Descriptions of devices from the reports of IREE's drivers."""

from __future__ import annotations

import pytest
from support.vulkan import LAVAPIPE_REPORT, PATH, describe_lavapipe

from hil.formats.iree_devices import (
    find_device,
    get_driver,
    is_software_gpu,
    match_devices,
    number_equal_ids,
    parse_device,
)


def test_parse_device_reads_target_properties_of_vulkan():
    found = describe_lavapipe()
    assert found["id"] == f"vulkan://{PATH}"
    assert (found["name"], found["type"]) == ("llvmpipe (LLVM 15.0.6, 256 bits)", "cpu")
    assert found["driver"] == "llvmpipe Mesa 22.3.6 (LLVM 15.0.6)"
    properties = found["properties"]
    assert (properties["api"], properties["subgroup_size"]) == ("1.3.230", "8")
    assert properties["subgroup_operations"] == "0x000000bf"
    assert {"shaderFloat16", "shaderInt8"} <= set(properties["features"].split())
    assert "cooperativeMatrix" not in properties["features"]


def test_parse_device_reads_architecture_of_cuda():
    report = "\n- gpu-compute-capability: 8.9\n- gpu-arch-name: sm_89\n- launch-max-block-dims: (1024, 1024, 64)\n"
    found = parse_device("cuda", {"path": "GPU-1", "name": "NVIDIA L4"}, report)
    assert (found["id"], found["name"], found["type"]) == ("cuda://GPU-1", "NVIDIA L4", "gpu")
    assert found["properties"] == {"arch": "sm_89", "compute_capability": "8.9"}


@pytest.mark.parametrize(("word", "kind"), [("discrete_gpu", "discrete-gpu"), ("integrated gpu", "integrated-gpu")])
def test_parse_device_normalizes_types(word, kind):
    report = LAVAPIPE_REPORT.replace("type: cpu", f"type: {word}")
    assert parse_device("vulkan", {"path": PATH}, report)["type"] == kind


@pytest.mark.parametrize("report", ["", "no colon", "subgroup: size=", "features:", "\0: \0"])
def test_parse_device_omits_values_of_damaged_report(report):
    found = parse_device("vulkan", {"path": PATH, "name": "gpu"}, report)
    assert found["name"] == "gpu"
    assert "subgroup_size" not in found["properties"]


def test_software_gpu_is_gpu_driver_on_cpu():
    assert is_software_gpu(describe_lavapipe())
    assert not is_software_gpu({**describe_lavapipe(), "type": "discrete-gpu"})
    assert not is_software_gpu(parse_device("local-task", {"path": "", "name": "default"}, ""))
    assert not is_software_gpu({"id": "CPUExecutionProvider", "type": "cpu"})


def test_find_device_by_name_or_driver():
    first, second = describe_lavapipe(), {**describe_lavapipe(), "id": "vulkan://GPU-2"}
    runtimes = [{"name": "tflite"}, {"name": "iree", "device_details": [first, second]}]
    assert find_device(runtimes, "iree", "vulkan") == first
    assert find_device(runtimes, "iree", "vulkan://GPU-2") == second
    assert find_device(runtimes, "iree", "cuda") is None
    assert find_device(runtimes, "tflite", "vulkan") is None
    assert get_driver("vulkan://GPU-2") == "vulkan"


FIRST = describe_lavapipe()
SECOND = {**FIRST, "id": "vulkan://GPU-2", "name": "Radeon RX 7900"}
CPU = parse_device("local-task", {"path": "", "name": "default"}, "")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("vulkan", [FIRST]),
        ("vulkan://1", [SECOND]),
        ("vulkan://2", []),
        ("vulkan://GPU-2", [SECOND]),
        ("vulkan://radeon", [SECOND]),
        ("vulkan://7900", [SECOND]),
        ("vulkan://e", [FIRST, SECOND]),
        ("vulkan://\u0663", []),
        ("cuda", []),
        ("cuda://0", []),
        ("radeon", []),
        ("local-task", [CPU]),
    ],
)
def test_match_devices_by_position_id_or_name(wanted, found):
    assert match_devices([CPU, FIRST, SECOND], wanted) == found


def test_ambiguous_name_finds_no_device():
    runtimes = [{"name": "iree", "device_details": [FIRST, SECOND]}]
    assert find_device(runtimes, "iree", "vulkan://e") is None


def test_devices_with_equal_paths_are_numbered():
    devices = number_equal_ids([FIRST, SECOND, FIRST])
    assert [one["id"] for one in devices] == ["vulkan://0", "vulkan://GPU-2", "vulkan://2"]
    assert match_devices(devices, "vulkan://2") == [devices[2]]
