from __future__ import annotations

from dataclasses import replace

from hil.controller.farm.host.board_connection import labels_of
from hil.controller.farm.selector import parse
from hil.core.boards import load_board

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
BOARD = replace(load_board("generic"), labels={"chip": "a53", "cores": 3})


def test_selectors_find_what_the_agent_tells_and_what_the_config_says():
    labels = labels_of(BOARD, INFO)
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


def test_the_configs_word_goes_before_what_was_found():
    assert labels_of(BOARD, INFO)["cores"] == 3


def test_of_a_board_that_does_not_answer_the_config_is_all_there_is():
    assert labels_of(BOARD, {}) == {"chip": "a53", "cores": 3}


def test_a_limit_on_programs_is_the_memory_that_counts():
    assert labels_of(BOARD, INFO | {"memory_limit_bytes": str(64 << 20)})["mem"] == 64 << 20


def test_a_simulated_board_says_so_and_one_without_an_agent_too():
    assert labels_of(load_board("sim"), {})["simulated"] is True
    assert labels_of(BOARD, INFO | {"simulated": ["sim"]})["simulated"] is True
    assert labels_of(replace(BOARD, command=replace(BOARD.command, kind="command")), {})["agentless"] is True
