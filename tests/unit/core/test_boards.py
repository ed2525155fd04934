from __future__ import annotations

import os
from pathlib import Path

import pytest

from hil.core.board_config import BoardCommand, Command
from hil.core.boards import list_boards, load_board, read_board
from hil.core.config_files import trust
from hil.core.runtimes import RUNTIMES
from hil.errors import UsageError


def test_load_board_finds_bundled_simulators():
    for name in ("sim", "sim-f16", "sim-small"):
        board = load_board(name).config
        assert board.hw_type == name
        assert board.is_simulator
        assert any("target-cpu" in flag for flag in board.compile_flags["iree"])


def config_at(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.toml").write_text(text)
    return folder / f"{name}.toml"


def test_load_board_prefers_user_directories(tmp_path, monkeypatch):
    kind = '[board]\nhw_type = "{}"\n[simulator]\n'
    for folder, names in (("named", "a"), ("config/hil/boards", "ab"), ("here/board_configs", "abc")):
        for name in names:
            config_at(tmp_path / folder, name, kind.format(folder[0]))
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HIL_BOARDS", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert [load_board(name).config.hw_type for name in "abc"] == ["n", "c", "h"]


@pytest.mark.parametrize("folder", ["named", "config/hil/boards", "board_configs"])
def test_load_board_ignores_files_shadowing_builtin_boards(folder, tmp_path, monkeypatch):
    for name in ("sim", "generic", "farm", "local", "ssh", "unix"):
        config_at(tmp_path / folder, name, '[board]\nhw_type = "mine"\n[simulator]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIL_BOARDS", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert (load_board("sim").config.hw_type, load_board("generic").config.hw_type) == ("sim", "generic")
    assert not list_boards().keys() & {"farm", "local", "ssh", "unix"}


def test_known_boards_ignore_empty_or_relative_variables(tmp_path, monkeypatch):
    path = config_at(tmp_path, "lab", '[connection]\naddress = "unix:/a"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    monkeypatch.setenv("HIL_BOARDS", "")
    assert "lab" not in list_boards()
    config_at(tmp_path / "config/hil/boards", "lab", path.read_text())
    assert "lab" not in list_boards()
    monkeypatch.setenv("HIL_BOARDS", ".")
    assert "lab" in list_boards()
    with pytest.raises(UsageError, match="not trusted"):
        load_board("lab")
    monkeypatch.setenv("HIL_BOARDS", str(tmp_path))
    assert load_board("lab").config.connection.address == "unix:/a"


def test_load_board_rejects_pipe_and_oversized_config(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "long.toml").write_text("#" * (1 << 21))
    for name, word in (("pipe", "a named pipe"), ("long", "are allowed")):
        with pytest.raises(UsageError, match=word):
            load_board(str(tmp_path / f"{name}.toml"))


def test_load_board_reads_all_tables(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(
        '[board]\nhw_type = "rpi5"\nruntime = "onnxruntime"\n'
        '[connection]\naddress = "board.example:7000"\nca = "ca.pem"\ntoken_file = "token"\n'
        '[devices]\niree = "local-sync"\n[compile_flags]\niree = ["--a", "--b"]\n[labels]\nchip = "a76"\n'
    )
    board = load_board(str(path)).config
    assert (board.name, board.hw_type, board.runtime) == ("lab", "rpi5", "onnxruntime")
    assert not board.is_simulator
    assert board.connection.ca == "ca.pem"
    assert board.compile_flags == {"iree": ("--a", "--b")}
    assert board.labels == {"chip": "a76"}


def test_load_board_star_device_covers_unlisted_runtimes(tmp_path):
    path = tmp_path / "some.toml"
    path.write_text('[devices]\nvendor = "npu"\niree = "local-sync"\n"*" = ""\n[simulator]\n')
    devices = load_board(str(path)).config.devices
    assert devices == {**dict.fromkeys(RUNTIMES, ""), "vendor": "npu", "iree": "local-sync"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("not toml [", "cannot be read"),
        ("[surprise]\n", "surprise"),
        ('[board]\ncolour = "red"\n[simulator]\n', "colour"),
        ("board = 3\n", "must be a table"),
        ("[board]\nname = 3\n[simulator]\n", "name must be text"),
        ('[simulator]\nmemory_limit = "big"\n', "memory_limit must be a number"),
        ('[simulator]\nfaults = "crash"\n', "faults must be a list"),
        ('[compile_flags]\niree = "--a"\n[simulator]\n', "iree must be a list"),
        ("[connection]\naccept_new_host_key = 1\n", "must be true or false"),
        ("[board]\npath = 'x'\n", "unknown key 'path'"),
        ("[board]\ndevices = {iree = 'gpu'}\n", "unknown key 'devices'"),
        ("[devices]\niree = 3\n", "table of strings"),
        ('[connection]\naddress = "unix:a\\u0000b"\n', "contains a NUL"),
        ('[compile_flags]\niree = ["a\\u0000b"]\n', "contains a NUL"),
    ],
)
def test_load_board_reports_cause_of_invalid_config(tmp_path, text, word):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UsageError, match=word):
        load_board(str(tmp_path / "bad.toml"))


def test_load_board_lists_known_boards_for_unknown_name():
    with pytest.raises(UsageError) as caught:
        load_board("nonesuch")
    assert "sim-f16" in caught.value.hint
    with pytest.raises(UsageError):
        load_board("nonesuch.toml")


def test_loaded_board_reports_origin_and_trust(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = config_at(tmp_path / "board_configs", "lab", '[connection]\naddress = "unix:/a"\n')
    typed, found = load_board(str(path)), read_board(path)
    assert (typed.is_foreign, typed.is_trusted) == (False, True)
    assert (found.is_foreign, found.is_trusted) == (True, False)
    assert typed.digest == found.digest and typed.path == found.path == path
    trust(path.parent, {path: found.digest})
    assert found.is_trusted
    assert not load_board("sim").is_foreign


POWER = '[power]\nreset = ["usbrelay"]\noff = ["no"]\non = ["yes"]\n'


def test_load_board_reads_recovery_steps(tmp_path):
    steps = 'steps = ["reset", { board = "rmmod npu" }, { command = ["./fix.sh", "a b"] }, "cycle"]\ntimeout_s = 5'
    path = config_at(tmp_path, "b", f"{POWER}[recover]\n{steps}")
    board = load_board(str(path)).config
    fix = Command((str(tmp_path / "fix.sh"), "a b"))
    assert board.recovery_steps == ("reset", BoardCommand(("rmmod", "npu")), fix, "cycle")
    assert board.recover.timeout_s == 5 and "[recover] steps" in board.asks
    # The content of the command needs trust as well.
    (tmp_path / "fix.sh").write_text("one")
    before = read_board(path).digest
    (tmp_path / "fix.sh").write_text("two")
    assert before and read_board(path).digest != before


def test_recovery_steps_default_to_power_actions(tmp_path):
    assert load_board(str(config_at(tmp_path, "b", POWER))).config.recovery_steps == ("reset", "cycle")
    assert load_board(str(config_at(tmp_path, "c", "[power]\noff = ['no']"))).config.recovery_steps == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('steps = ["reset"]', r"step 'reset' needs \[power\] reset"),
        ('steps = ["explode"]', "step 'explode' is unknown"),
        ("steps = [{ command = [] }]", "must be a command"),
        ("steps = [{ command = { url = 'http://x' } }]", "is unknown"),
        ("steps = [{ board = ['a'], command = ['b'] }]", "is unknown"),
        ("steps = [1]", "step 1 is unknown"),
        ("steps = 'reset'", "steps must be a list"),
        ("timeout_s = 0", "timeout_s must be a number of seconds"),
        ("retries = 2", "unknown key 'retries'"),
    ],
)
def test_load_board_rejects_invalid_recover_table(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        load_board(str(config_at(tmp_path, "b", f"[recover]\n{text}")))


@pytest.mark.parametrize("value", ["-1", "11", "true", "1.0", '"0"'])
def test_load_board_rejects_invalid_icount_shift(tmp_path, value):
    (tmp_path / "b.toml").write_text(f"[board]\nicount_shift = {value}\n")
    with pytest.raises(UsageError, match="icount_shift must be a whole number from 0 to 10"):
        load_board(str(tmp_path / "b.toml"))


def test_board_has_time_unless_its_clock_counts(tmp_path):
    (tmp_path / "b.toml").write_text("[board]\nicount_shift = 0\n")
    assert not load_board(str(tmp_path / "b.toml")).config.has_time
    (tmp_path / "b.toml").write_text("")
    assert load_board(str(tmp_path / "b.toml")).config.has_time


@pytest.mark.parametrize(
    ("name", "exact"), [("sim", True), ("sim-small", True), ("sim-undeclared", False), ("generic", False)]
)
def test_only_exact_simulators_have_known_arithmetic(name: str, exact: bool) -> None:
    assert load_board(name).config.is_exact is exact


def test_unknown_board_suggests_config_in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "laptop.toml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="unknown board 'laptop'") as caught:
        load_board("laptop")
    assert caught.value.hint.startswith("did you mean 'laptop.toml'?")


def test_simulator_compiles_iree_in_its_arithmetic(tmp_path: Path) -> None:
    demote = "--iree-global-opt-demote-contraction-inputs-"
    flags = ("--arithmetic=bfloat16", f"{demote}type=bf16", f"{demote}operations=all")
    text = '[simulator]\narithmetic = "bfloat16"\n'
    assert read_board(config_at(tmp_path, "a", text)).config.compile_flags == {"iree": flags}
    text += "[compile_flags]\niree = {}\n"
    found = read_board(config_at(tmp_path, "b", text.format('["--iree-llvmcpu-target-cpu=host"]'))).config
    assert found.compile_flags["iree"] == ("--iree-llvmcpu-target-cpu=host", *flags)
    found = read_board(config_at(tmp_path, "c", text.format('["--arithmetic=int8"]'))).config
    assert found.compile_flags["iree"] == ("--arithmetic=int8",)
    assert read_board(config_at(tmp_path, "d", "[simulator]\n")).config.compile_flags == {}
    undeclared = load_board("sim-undeclared").config
    assert not any(flag.startswith("--arithmetic=") for flag in undeclared.compile_flags["iree"])
