"""Emulated microcontrollers: models run on them, and each failure of board and line has its outcome."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.commands import Ended
from support.layer_models import with_wrong_weight
from support.microcontrollers import EACH_CHIP, Microcontrollers, require_emulator
from support.models import DIGITS
from support.planted_firmware import build_firmware
from support.waiting import eventually

from hil.controller.storage.cache import choose_default_root
from hil.core.board_parser import read_config
from hil.core.chips import parse_chip
from hil.errors import ErrorCode, HilError, LoadFailed, RunCrashed, RunFailed, UsageError
from hil.formats.firmware import DESCRIPTION
from hil.mcu.runtime import FirmwareProgram, McuRuntime
from tools.check_microcontrollers import check_layers, write_models
from tools.virtual_board.cli import cli
from tools.virtual_board.microcontroller import MicrocontrollerBoard

MODEL = DIGITS / "digits_cnn.onnx"
INT8 = DIGITS / "digits_cnn_int8.onnx"
Run = Callable[..., Ended]


@pytest.fixture
def m4(start_chip: Microcontrollers) -> Iterator[MicrocontrollerBoard]:
    """Return a Cortex-M4 with a good line."""
    board = start_chip("cortex-m4")
    yield board
    board.ask("restore")
    board.ask("faults")
    board.ask("power_on")


@pytest.fixture
def configure(m4: MicrocontrollerBoard, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that adds keys to the table [mcu] of the board's config."""

    def write(lines: str) -> Path:
        path = tmp_path / "m4.toml"
        path.write_text(f"{m4.config.read_text()}{lines}\n")
        return path

    return write


@pytest.fixture
def background(hil: Run) -> Iterator[Callable[..., Future[Ended]]]:
    """Return a function that runs a command in a thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda *words: pool.submit(hil, *words)


def wait_for_runs(board: MicrocontrollerBoard, running: Future[Ended]) -> None:
    """Wait until the board has answered some hundred requests of a command."""
    before = board.status()["up"]
    eventually(lambda: board.status()["up"] > before + 5_000 or running.done())
    assert not running.done(), running.result().out


@pytest.mark.parametrize("chip", EACH_CHIP)
@pytest.mark.timeout(600)
def test_digits_pass_and_firmware_is_flashed_once(chip: str, hil: Run, start_chip: Microcontrollers) -> None:
    board = start_chip(chip)
    before = board.status()["flashed"]
    for recompiled in ((), ("--recompute-cache",)):
        ended = hil("run", MODEL, "--board", board.config, "--seed", len(recompiled), *recompiled, "--json")
        assert ended.code == 0, ended.out + ended.err
        assert ended.case["outcome"] == "PASS"
        # The agent's memory is not the memory of the program.
        assert ended.case["peak_memory_bytes"] == ended.case["artifact"]["notes"]["ram_bytes"] < 1 << 20
    # Another test may have flashed the same firmware before.
    assert board.status()["flashed"] in (before, before + 1)
    compiled = hil("compile", MODEL, "--board", board.config, "-o", "out/digits.elf", "--json")
    assert sorted(Path(one).name for one in compiled.document["files"]) == ["digits.bin", "digits.elf", "digits.json"]
    elf = next(Path(one) for one in compiled.document["files"] if one.endswith(".elf"))
    assert elf.parent.name == "out"


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["cortex-m55", "cortex-m4", "riscv32"])
@pytest.mark.timeout(600)
def test_int8_digits_pass(chip: str, hil: Run, start_chip: Microcontrollers) -> None:
    ended = hil("run", INT8, "--board", start_chip(chip).config, "--json")
    assert ended.code == 0, ended.out + ended.err


@pytest.mark.parametrize("fault", ["cut", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kill", "freeze"))])
def test_a_board_that_stops_answering_is_lost_and_the_next_run_passes(
    fault: str, hil: Run, background: Callable[..., Future[Ended]], m4: MicrocontrollerBoard, configure: Callable
) -> None:
    config = configure("watchdog_s = 1.0")
    running = background("run", MODEL, "--board", config, "--iterations", 20_000, "--json")
    wait_for_runs(m4, running)
    m4.ask(fault)
    ended = running.result()
    assert ended.case["outcome"] == "BOARD_LOST", ended.out
    assert "does not answer on the serial line" in ended.case["reason"]
    for verb in ("restore", "thaw", "power_on"):
        m4.ask(verb)
    assert hil("run", MODEL, "--board", config).code == 0


@pytest.mark.slow
def test_a_reset_during_a_run_is_reported_and_the_next_run_passes(
    hil: Run, background: Callable[..., Future[Ended]], m4: MicrocontrollerBoard
) -> None:
    running = background("run", MODEL, "--board", m4.config, "--iterations", 20_000, "--json")
    wait_for_runs(m4, running)
    m4.ask("reset")
    ended = running.result()
    assert ended.case["outcome"] == "BOARD_LOST", ended.out
    assert "the microcontroller restarted" in ended.case["reason"]
    assert hil("run", MODEL, "--board", m4.config).code == 0


@dataclass(frozen=True)
class Planted:
    """C code of a dispatch, and the error of a run."""

    body: str
    error: type[HilError]
    message: str
    before: str = ""


PLANTED = {
    "stack": Planted(
        "volatile char big[64]; big[0] = 1; return planted(environment, big, workgroup) + big[0];",
        RunCrashed,
        "stack overflow in planted",
        before="static int planted(const void *, const void *, const void *);",
    ),
    "bus": Planted("*(volatile int *)0xf0000000u = 1; return 0;", RunCrashed, " in planted"),
    "instruction": Planted('__asm__ volatile(".4byte 0xffffffff"); return 0;', RunCrashed, " in planted"),
    "jump": Planted("((void (*)(void))0xe0000001u)(); return 0;", RunCrashed, "called by planted"),
    "loop": Planted(
        "for (volatile int i = 0;; i++) {}", RunCrashed, "time limit of the firmware's watchdog in planted"
    ),
    "code": Planted("return 42;", RunFailed, "the dispatch planted returned 42"),
}


def load_planted(board: MicrocontrollerBoard, plant: Planted, folder: Path, **changed: str) -> FirmwareProgram:
    """Build firmware, and load it on a board."""
    config = read_config(board.config).mcu
    assert config is not None
    chip = parse_chip(config.values)
    build_firmware(chip, plant.body, folder, choose_default_root() / "zig", before=plant.before)
    settings = {
        **{"address": board.address, "chip": {**config.values, **changed}, "flash": config.flash},
        **{"reset": config.reset, "boot_s": 30.0, "watchdog_s": 0.5},
    }
    program = McuRuntime({"mcu": settings}).load(folder, DESCRIPTION, "", "")
    program.bind([np.zeros(1, np.float32)])
    return program


@pytest.mark.parametrize("kind", ["stack", *(pytest.param(name, marks=pytest.mark.slow) for name in [*PLANTED][1:])])
@pytest.mark.parametrize("chip", EACH_CHIP)
@pytest.mark.timeout(600)
def test_a_fault_of_the_program_names_its_function(
    chip: str, kind: str, start_chip: Microcontrollers, tmp_path: Path
) -> None:
    plant = PLANTED[kind]
    program = load_planted(start_chip(chip), plant, tmp_path)
    try:
        for _ in range(2):  # the board is ready again after a fault
            with pytest.raises(plant.error) as caught:
                program.run()
            assert plant.message in caught.value.message
            program.bind([np.zeros(1, np.float32)])
    finally:
        program.close()


@pytest.mark.slow
def test_firmware_for_another_chip_is_refused(start_chip: Microcontrollers, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="the firmware is for mps2-an386, the board has mps3-an547") as caught:
        load_planted(start_chip("cortex-m4"), PLANTED["code"], tmp_path, chip="mps3-an547")
    assert caught.value.code == ErrorCode.WRONG_TARGET


def test_the_watchdog_ends_a_long_run(hil: Run, m4: MicrocontrollerBoard, configure: Callable) -> None:
    ended = hil("run", MODEL, "--board", configure("watchdog_s = 0.001"), "--json")
    assert ended.case["outcome"] == "RUN_CRASH", ended.out
    assert "the run exceeded the time limit of the firmware's watchdog" in ended.case["reason"]
    assert hil("run", MODEL, "--board", m4.config).code == 0


def test_a_program_too_large_for_the_chip_names_the_missing_memory(hil: Run, configure: Callable) -> None:
    ended = hil("run", MODEL, "--board", configure("flash_memory = '0:16K'\nram = '0x20000000:17K'"), "--json")
    assert ended.case["outcome"] == "COMPILE_ERROR", ended.out
    assert "the program does not fit into mps2-an386" in ended.case["reason"]
    for memory in ("flash", "RAM"):
        assert f"bytes more {memory}" in ended.case["reason"]


def test_a_failed_flash_command_shows_its_output(hil: Run, m4: MicrocontrollerBoard, tmp_path: Path) -> None:
    m4.ask("kill")
    config = tmp_path / "m4.toml"
    text = m4.config.read_text()
    config.write_text("\n".join(line for line in text.splitlines() if not line.startswith(("flash =", "reset ="))))
    config.write_text(config.read_text() + '\nflash = ["sh", "-c", "echo probe not found; exit 3"]\nboot_s = 1.0\n')
    ended = hil("run", MODEL, "--board", config, "--json")
    assert ended.case["outcome"] == "BOARD_UNFIT", ended.out
    assert "flashing the firmware failed: probe not found" in ended.case["reason"]


@pytest.mark.parametrize(
    "faults",
    [
        "loss=0.02,flip=0.02,repeat=0.02",
        *(
            pytest.param(f"{name}={rate}", marks=pytest.mark.slow)
            for name in ("loss", "flip", "repeat", "delay")
            for rate in (0.01, 0.1, 0.5)
        ),
    ],
)
@pytest.mark.timeout(600)
def test_a_bad_line_never_changes_an_answer(faults: str, hil: Run, m4: MicrocontrollerBoard) -> None:
    hil("run", MODEL, "--board", m4.config)  # flash over a good line
    m4.ask("faults", faults)
    ended = hil("run", MODEL, "--board", m4.config, "--iterations", 5, "--json")
    assert ended.case["outcome"] in ("PASS", "BOARD_LOST", "BOARD_UNFIT"), ended.out
    if faults.startswith(("repeat", "loss=0.0", "flip=0.0", "delay=0.0")):
        assert ended.case["outcome"] == "PASS", ended.case["reason"]
    m4.ask("faults")
    assert hil("run", MODEL, "--board", m4.config).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["cortex-m55", "cortex-m4"])
@pytest.mark.timeout(900)
def test_bisect_finds_a_wrong_weight_on_a_microcontroller(
    chip: str, hil: Run, start_chip: Microcontrollers, tmp_path: Path
) -> None:
    wrong = with_wrong_weight(MODEL, tmp_path / "received.onnx", "conv2.weight")
    ended = hil("bisect", MODEL, "--artifact-model", wrong, "--board", start_chip(chip).config, "--json")
    assert ended.code == 1, ended.err
    assert "conv2" in ended.document["first_isolated"]
    assert ended.document["first_isolated"] == ended.document["first_cumulative"]
    assert np.all([layer["isolated"]["outcome"] in ("PASS", "FAIL") for layer in ended.document["layers"]])


def test_board_info_names_the_chip(hil: Run, m4: MicrocontrollerBoard) -> None:
    ended = hil("board", "info", m4.config)
    assert ended.code == 0, ended.err
    assert "mps2-an386" in ended.out


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the example models, as float32 and int8."""
    folder = tmp_path_factory.mktemp("tiny")
    script = DIGITS.parent / "microcontrollers" / "make.py"
    subprocess.run([sys.executable, script, "--out", folder, "--int8"], check=True, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet8", "ds_cnn", "mobilenet", "autoencoder", "decoder_step"])
@pytest.mark.parametrize("chip", ["cortex-m55", "cortex-m4"])
@pytest.mark.timeout(1200)
def test_example_models_pass(chip: str, name: str, hil: Run, start_chip: Microcontrollers, tiny_models: Path) -> None:
    for kind in ("", "_int8"):
        ended = hil("run", tiny_models / f"{name}{kind}.onnx", "--board", start_chip(chip).config, "--json")
        assert ended.case["outcome"] == "PASS", ended.case["reason"]
        notes = ended.case["artifact"]["notes"]
        assert 0 < notes["flash_bytes"] <= notes["chip_flash_bytes"]
        assert 0 < notes["ram_bytes"] <= notes["chip_ram_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["cortex-m55", "cortex-m4"])
@pytest.mark.timeout(900)
def test_each_layer_passes(
    chip: str, start_chip: Microcontrollers, environment: dict[str, str], tmp_path: Path
) -> None:
    write_models(["digits_cnn"], tmp_path / "models")
    found = check_layers(chip, start_chip(chip).config, tmp_path / "models", tmp_path / "out", environment)
    assert [one for one in found if one.result != "pass"] == []
    cases = {one.case for one in found}
    assert cases >= {"digits_cnn_full_model", "digits_cnn_int8_full_model", "digits_cnn_layer_Gemm_fc1"}, cases
    assert len(cases) > 15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_layers_that_do_not_fit_name_the_missing_memory(
    configure: Callable[[str], Path], environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    shutil.copy(MODEL, tmp_path / "models")
    config = configure("flash_memory = '0:24K'\nram = '0x20000000:32K'")
    found = check_layers("cortex-m4", config, tmp_path / "models", tmp_path / "out", environment)
    kinds = {one.result for one in found}
    assert kinds == {"pass", "do not fit"}, found
    for one in found:
        if one.result == "do not fit":
            assert one.outcome == "COMPILE_ERROR" and "bytes more flash" in one.message
        assert one.result == "do not fit" or "Conv_conv2" not in one.case


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_profile_has_ticks_of_each_dispatch_and_no_times(hil: Run, m4: MicrocontrollerBoard, tmp_path: Path) -> None:
    ended = hil("run", MODEL, "--board", m4.config, "--profile", tmp_path / "profile", "--json")
    assert ended.case["outcome"] == "PASS", ended.out
    assert ended.case["device"]["p50_ns"] is None and ended.case["instructions"]["counter"] == "icount"
    shown = hil("profile", "show", tmp_path / "profile", "--json").document
    assert shown["totals"] == [] and shown["timed_p50_ns"] is None
    nodes = {node for one in shown["ticks"]["operations"] for node in one["onnx_nodes"]}
    assert nodes >= {"conv1", "conv2", "fc1"}
    # Ticks are repeatable within a few instructions of the emulated CPU.
    assert all(one["maximum"] - one["minimum"] <= 100 for one in shown["ticks"]["operations"])


# The command leaves the board's process behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_command_starts_lists_and_ends_a_microcontroller(tmp_path: Path) -> None:
    require_emulator("cortex-m4")
    runner = CliRunner(env={"HIL_VIRTUAL_LAB": str(tmp_path / ("lab" * 40))})

    def call(*words: str) -> str:
        done = runner.invoke(cli, words)
        assert done.exit_code == 0, (words, done.output, done.exception)
        return done.output

    config = tmp_path / "m4.toml"
    try:
        reach = json.loads(call("up", "m4", "--chip", "cortex-m4", "--config", str(config)))
        assert config.read_text() == Path(reach["config"]).read_text()
        assert call("list").split("\t") == ["m4", "mps2-an386", reach["address"], "power off", "cable up\n"]
        for words in (["cut"], ["restore"], ["freeze"], ["thaw"], ["reboot"], ["kill"]):
            call(*words, "m4")
        assert json.loads(call("up", "m4")) == reach
        call("faults", "m4", "loss=0.1,flip=0.1")
        with pytest.raises(UsageError, match="the probability of loss must be from 0 to 1"):
            runner.invoke(cli, ["faults", "m4", "loss=2"], catch_exceptions=False)
        with pytest.raises(UsageError, match="already running with different options"):
            runner.invoke(cli, ["up", "m4", "--chip", "cortex-m4", "--baud", "9600"], catch_exceptions=False)
    finally:
        call("down", "m4")
    assert call("list") == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chip", "cortex-m3"], "unknown chip 'cortex-m3'"),
        (["--baud", "9600"], "--baud requires --chip"),
        (["--chip", "cortex-m4", "--arch", "aarch64"], "--arch is not for microcontrollers"),
    ],
)
def test_command_rejects_invalid_options(words: list[str], message: str, tmp_path: Path) -> None:
    runner = CliRunner(env={"HIL_VIRTUAL_LAB": str(tmp_path)})
    with pytest.raises(UsageError, match=message):
        runner.invoke(cli, ["up", "m4", *words], catch_exceptions=False)


def test_missing_emulator_names_the_package(tmp_path: Path) -> None:
    runner = CliRunner(env={"HIL_VIRTUAL_LAB": str(tmp_path), "PATH": str(tmp_path)})
    with pytest.raises(UsageError) as caught:
        runner.invoke(cli, ["up", "m4", "--chip", "riscv32"], catch_exceptions=False)
    assert caught.value.hint == "apt-get install qemu-system-misc"
