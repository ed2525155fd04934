from __future__ import annotations

import json
from pathlib import Path

import pytest

from hil.controller.devices.choosing.board_resolver import choose
from hil.core.boards import LoadedBoard, load_board, read_board
from hil.core.config_files import read_trusted, remove_trust, trust
from hil.errors import UsageError

HARMLESS = """
[board]
hw_type = "rpi5"
description = "a board"
runtime = "onnxruntime"
[devices]
iree = "local-task"
[labels]
chip = "a76"
[simulator]
memory_limit = 1000
faults = ["crash"]
[runtime]
kind = "command"
tensors = "npy"
version = "1.4"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a project with board configs and make it the working directory."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HIL_BOARDS", raising=False)
    made = tmp_path / "project" / "board_configs"
    made.mkdir(parents=True)
    monkeypatch.chdir(made.parent)
    return made


def write(folder: Path, text: str) -> LoadedBoard:
    (folder / "lab.toml").write_text(text)
    return read_board(folder / "lab.toml")


def trust_configs(folder: Path, board: LoadedBoard) -> None:
    trust(folder, {board.path: board.digest})


def refused(word: str = "have not trusted") -> bool:
    with pytest.raises(UsageError, match=word):
        load_board("lab")
    return True


def test_load_board_accepts_descriptive_config_without_trust(folder):
    write(folder, HARMLESS)
    assert load_board("lab").config.hw_type == "rpi5"


@pytest.mark.parametrize(
    "text",
    [
        *('[connection]\naddress = "unix:/a"', '[connection]\ntoken_file = "/etc/passwd"', "[connection]\nfence = 3"),
        '[connection]\nfolder = "/"',
        '[connection]\nidentity = "~/.ssh/id_rsa"',
        '[compile_flags]\niree = ["-o", "/tmp/x"]',
        *('[power]\nreset = ["touch", "x"]', '[power]\non = { url = "http://evil/" }', "[power]\nboot_s = 3"),
        *('[runtime]\nprogram = "sh"', '[runtime]\nfile = "/etc/passwd"', '[runtime]\nflags = ["-c"]'),
        '[runtime]\nenvironment = { LD_PRELOAD = "x" }',
        *('[labgrid]\nclient = "./x"', '[labgrid]\nplace = "p"'),
    ],
)
def test_load_board_requires_trust_and_detects_changes(folder, text):
    board = write(folder, f"{HARMLESS.partition('[runtime]')[0]}{text}\n")
    assert refused()
    trust_configs(folder, board)
    assert load_board("lab").config.path == folder / "lab.toml"
    write(folder, f"{board.config.text}# altered\n")
    assert refused("altered since")
    write(folder, board.config.text)
    assert load_board("lab")
    assert remove_trust(folder) and not remove_trust(folder)
    assert refused()


def test_board_path_trusted_if_typed_or_absolute_variable(folder, monkeypatch):
    write(folder, '[connection]\naddress = "unix:/a"\n')
    assert choose("board_configs/lab.toml").config.connection.address == "unix:/a"
    monkeypatch.setenv("HIL_BOARD", "board_configs/lab.toml")
    with pytest.raises(UsageError, match=r"have not trusted.*set by the variable HIL_BOARD"):
        choose()
    monkeypatch.setenv("HIL_BOARD", str(folder / "lab.toml"))
    assert choose().config.connection.address == "unix:/a"


def test_trust_covers_program_next_to_config(folder):
    for text in ('[power]\nreset = ["../reset.sh"]\n', '[runtime]\nfile = "../reset.sh"\n'):
        script = folder.parent / "reset.sh"
        script.write_text("true")
        trust_configs(folder, write(folder, text))
        assert load_board("lab")
        script.write_text("evil")
        assert refused("altered since")
        script.unlink()
        assert refused("altered since")


def test_trust_does_not_extend_to_copies_of_a_config(folder, tmp_path, monkeypatch):
    board = write(folder, '[power]\nreset = ["touch"]\n')
    trust_configs(folder, board)
    other = tmp_path / "other" / "board_configs"
    other.mkdir(parents=True)
    write(other, board.config.text)
    monkeypatch.chdir(other.parent)
    assert refused()


def test_trust_of_link_covers_target_content(folder, tmp_path):
    there = tmp_path / "there.toml"
    there.write_text('[power]\nreset = ["touch"]\n')
    (folder / "lab.toml").symlink_to(there)
    assert refused()
    trust_configs(folder, read_board(folder / "lab.toml"))
    assert load_board("lab")
    there.write_text('[power]\nreset = ["rm"]\n')
    assert refused("altered since")


def test_trust_required_in_hil_checkouts(folder):
    (folder.parent / "hil").mkdir()
    (folder.parent / "pyproject.toml").write_text('[project]\nname = "hil"\n')
    write(folder, '[power]\nreset = ["touch"]\n')
    assert refused()


def test_trust_file_must_be_private_and_valid(folder, tmp_path):
    board = write(folder, '[power]\nreset = ["touch"]\n')
    trust_configs(folder, board)
    kept = tmp_path / "config/hil/trusted.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in kept.parent.iterdir()] == ["trusted.json"]
    assert list(read_trusted()) == [str(folder)]
    kept.chmod(0o620)
    assert refused("writable by other users")
    kept.chmod(0o600)
    for text in ("", "{", "[]", "3", "{}", '{"folders": 3}', '{"folders": {"a": 3}}', '{"folders": {"a": {"b": 3}}}'):
        kept.write_text(text)
        assert refused("is damaged")
    kept.write_text(json.dumps({"schema": 1, "folders": {}}))
    assert refused()


def test_trust_fails_without_home_directory(folder, monkeypatch):
    monkeypatch.setattr("hil.core.config_files.get_user_folder", lambda: None)
    board = write(folder, '[power]\nreset = ["touch"]\n')
    assert refused()
    with pytest.raises(UsageError, match="missing home directory"):
        trust_configs(folder, board)


def test_distrust_of_either_directory_revokes_trust(folder):
    board = write(folder, '[connection]\naddress = "unix:/a"\n')
    digests = {board.path: board.digest}
    for removed in (folder, folder.parent):
        trust(folder.parent, digests)
        trust(folder, digests)
        assert load_board("lab")
        assert remove_trust(removed)
        with pytest.raises(UsageError, match="have not trusted"):
            load_board("lab")


def test_trust_uses_latest_digest_across_directories(folder):
    for text in ('[connection]\naddress = "unix:/old"\n', '[connection]\naddress = "unix:/new"\n'):
        board = write(folder, text)
        trust(folder.parent if "old" in text else folder, {board.path: board.digest})
    assert load_board("lab")
    write(folder, '[connection]\naddress = "unix:/old"\n')
    with pytest.raises(UsageError, match="altered since"):
        load_board("lab")
