from __future__ import annotations

import os
from pathlib import Path

import pytest

from hil.core.boards import known_boards, load_board
from hil.core.runtimes import RUNTIMES
from hil.errors import UsageError


def test_the_simulators_come_with_hil():
    for name in ("sim", "sim-f16", "sim-small"):
        board = load_board(name)
        assert board.hw_type == name
        assert board.is_simulator
        assert any("target-cpu" in flag for flag in board.compile_flags["iree"])


def config_at(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.toml").write_text(text)
    return folder / f"{name}.toml"


def test_the_users_own_boards_come_before_those_of_the_working_directory(tmp_path, monkeypatch):
    kind = '[board]\nhw_type = "{}"\n[simulator]\n'
    for folder, names in (("named", "a"), ("config/hil/boards", "ab"), ("here/board_configs", "abc")):
        for name in names:
            config_at(tmp_path / folder, name, kind.format(folder[0]))
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HIL_BOARDS", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert [load_board(name).hw_type for name in "abc"] == ["n", "c", "h"]


@pytest.mark.parametrize("folder", ["named", "config/hil/boards", "board_configs"])
def test_no_folder_shadows_what_comes_with_hil(folder, tmp_path, monkeypatch):
    for name in ("sim", "generic", "farm", "local", "ssh", "unix"):
        config_at(tmp_path / folder, name, '[board]\nhw_type = "mine"\n[simulator]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIL_BOARDS", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert (load_board("sim").hw_type, load_board("generic").hw_type) == ("sim", "generic")
    assert not known_boards().keys() & {"farm", "local", "ssh", "unix"}


def test_an_empty_or_relative_variable_makes_no_folder_the_users_own(tmp_path, monkeypatch):
    path = config_at(tmp_path, "lab", '[connection]\naddress = "unix:/a"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    monkeypatch.setenv("HIL_BOARDS", "")
    assert "lab" not in known_boards()
    config_at(tmp_path / "config/hil/boards", "lab", path.read_text())
    assert "lab" not in known_boards()
    monkeypatch.setenv("HIL_BOARDS", ".")
    assert "lab" in known_boards()
    with pytest.raises(UsageError, match="not trusted"):
        load_board("lab")
    monkeypatch.setenv("HIL_BOARDS", str(tmp_path))
    assert load_board("lab").connection.address == "unix:/a"


def test_what_is_no_text_of_a_config_is_refused_before_it_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "long.toml").write_text("#" * (1 << 21))
    for name, word in (("pipe", "a named pipe"), ("long", "are allowed")):
        with pytest.raises(UsageError, match=word):
            load_board(str(tmp_path / f"{name}.toml"))


def test_a_board_with_an_address_is_read_whole(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(
        '[board]\nhw_type = "rpi5"\nruntime = "onnxruntime"\n'
        '[connection]\naddress = "board.example:7000"\nca = "ca.pem"\ntoken_file = "token"\n'
        '[devices]\niree = "local-sync"\n[compile_flags]\niree = ["--a", "--b"]\n[labels]\nchip = "a76"\n'
    )
    board = load_board(str(path))
    assert (board.name, board.hw_type, board.runtime) == ("lab", "rpi5", "onnxruntime")
    assert not board.is_simulator
    assert board.connection.ca == "ca.pem"
    assert board.compile_flags == {"iree": ("--a", "--b")}
    assert board.labels == {"chip": "a76"}


def test_a_star_stands_for_the_runtimes_of_hils_that_a_config_does_not_name(tmp_path):
    path = tmp_path / "some.toml"
    path.write_text('[devices]\nvendor = "npu"\niree = "local-sync"\n"*" = ""\n[simulator]\n')
    devices = load_board(str(path)).devices
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
        ("[board]\npath = 'x'\n", "no 'path'"),
        ("[board]\ndevices = {iree = 'gpu'}\n", "no 'devices'"),
        ("[devices]\niree = 3\n", "table of texts"),
        ('[connection]\naddress = "unix:a\\u0000b"\n', "no name or argument can"),
        ('[compile_flags]\niree = ["a\\u0000b"]\n', "no name or argument can"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(tmp_path, text, word):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UsageError, match=word):
        load_board(str(tmp_path / "bad.toml"))


def test_an_unknown_board_lists_the_known_ones():
    with pytest.raises(UsageError) as caught:
        load_board("nonesuch")
    assert "sim-f16" in caught.value.hint
    with pytest.raises(UsageError):
        load_board("nonesuch.toml")
