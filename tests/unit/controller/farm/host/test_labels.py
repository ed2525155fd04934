from __future__ import annotations

from dataclasses import replace

from hil.controller.farm.host.board_connection import collect_labels
from hil.controller.farm.selector import parse
from hil.core.boards import load_board
from hil.core.stack_config import StackValue

INFO = {
    "agent_version": "0.9",
    "machine": {
        "arch": "aarch64",
        "cpu_model": "Cortex-A53",
        "cpu_features": ["asimd", "crc32"],
        "cores": 4,
        "memory_bytes": str(2 << 30),
        "system": "Linux",
        "kernel": "6.1.21",
        "libc": "glibc 2.36",
    },
    "runtimes": [
        {"name": "onnxruntime", "version": "1.31.1", "devices": ["CPUExecutionProvider"]},
        {"name": "iree", "version": "3.13.0", "devices": ["local-task", "vulkan"]},
        {"name": "tflite", "error": "it does not import"},
    ],
}
BOARD = replace(load_board("generic").config, labels={"chip": "a53", "cores": 3})


def test_labels_combine_agent_info_and_config():
    labels = collect_labels(BOARD, INFO)
    for text in (
        "arch=aarch64",
        "cpu=Cortex-A53",
        "features=asimd",
        "mem>=2GiB",
        "kernel>=6.1",
        "runtimes in (iree, x)",
        "iree>=3.13",
        "devices=vulkan",
        "chip=a53",
        "!simulated",
        "!agentless",
        "!tflite",
    ):
        assert parse(text).matches(labels), text
    assert not parse("mem>2GiB").matches(labels)


def test_labels_prefer_config_over_agent_info():
    assert collect_labels(BOARD, INFO)["cores"] == 3


def test_labels_use_only_config_without_agent_info():
    assert collect_labels(BOARD, {}) == {"chip": "a53", "cores": 3}


def test_labels_report_program_memory_limit_as_mem():
    assert collect_labels(BOARD, INFO | {"memory_limit_bytes": str(64 << 20)})["mem"] == 64 << 20


def test_labels_mark_simulated_and_agentless_boards():
    assert collect_labels(load_board("sim").config, {})["simulated"] is True
    assert collect_labels(BOARD, INFO | {"simulated": ["sim"]})["simulated"] is True
    assert collect_labels(replace(BOARD, command=replace(BOARD.command, kind="command")), {})["agentless"] is True


def test_board_cannot_claim_permission_for_commands():
    claimed = replace(BOARD, labels={"commands": True})
    assert "commands" not in collect_labels(claimed, INFO)
    assert "commands" not in collect_labels(BOARD, {"runtimes": [{"name": "commands", "version": "1"}]})


def test_parts_of_stack_are_labels():
    config = replace(
        BOARD,
        stack={
            "driver": StackValue(text="1.1"),
            "firmware": StackValue(board=("fw",)),
            "npu": StackValue(board=("x",)),
        },
        labels={"stack.microcode": "mine"},
    )
    stack = [{"name": name, "version": "9"} for name in ("driver", "microcode", "ddr clock", "pci")]
    labels = collect_labels(config, INFO | {"stack": stack}, {"firmware": "boot 7"})
    found = {name: value for name, value in labels.items() if name.startswith("stack.")}
    assert found == {
        "stack.driver": "1.1",
        "stack.firmware": "boot 7",
        "stack.microcode": "mine",
        "stack.ddr clock": "9",
    }
    for text in ("stack.driver>=1.1", 'stack.firmware="boot 7"', '"stack.ddr clock"=9'):
        assert parse(text).matches(labels), text
