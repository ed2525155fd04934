from __future__ import annotations

import pytest

from hil.boards import known_boards, load_board
from hil.errors import UsageError


def test_the_simulators_come_with_hil():
    for name in ("sim", "sim-f16", "sim-small"):
        board = load_board(name)
        assert board.hw_type == name
        assert board.is_simulator
        assert any("target-cpu" in flag for flag in board.compile_flags["iree"])


def test_a_folder_named_in_the_environment_comes_first(tmp_path, monkeypatch):
    (tmp_path / "sim.toml").write_text('[board]\nhw_type = "mine"\n[simulator]\n')
    monkeypatch.setenv("HIL_BOARDS", str(tmp_path))
    assert load_board("sim").hw_type == "mine"
    assert known_boards()["sim"] == tmp_path / "sim.toml"


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
        ('[connection]\naddress = "unix:a\\u0000b"\n', "no name can"),
        ('[compile_flags]\niree = ["a\\u0000b"]\n', "no argument can"),
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
