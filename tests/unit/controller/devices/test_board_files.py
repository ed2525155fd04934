"""Board configs that `hil board add`, `rename` and `remove` write."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.devices.choosing.board_files import (
    NewBoard,
    add_board_file,
    find_board_file,
    make_board_config,
    remove_board_file,
    rename_board_file,
)
from hil.controller.devices.choosing.board_resolver import choose
from hil.core.board_parser import read_config
from hil.errors import StorageError, UsageError


@pytest.fixture(autouse=True)
def boards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the user's boards, which does not exist yet."""
    for name in ("HIL_BOARDS", "HIL_BOARD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "work" / "board_configs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "config" / "hil" / "boards"


def add(name: str, address: str, **more: object) -> Path:
    return add_board_file(make_board_config(NewBoard(name, address, **more)))


@pytest.mark.parametrize(
    "address",
    ["root@10.0.0.7", "root@10.0.0.7:2222", "ssh:lab", "unix:/run/agent.sock", "10.0.0.7:9000", "farm:chip=a53"],
)
def test_added_board_has_address(address, boards):
    path = add("kitchen", address, description="the board in the kitchen", connection={"identity": "/keys/id"})
    assert path == boards / "kitchen.toml"
    choice = choose("kitchen")
    assert (choice.name, choice.target, choice.config.hw_type) == ("kitchen", address, "generic")
    assert (choice.config.description, choice.config.connection.identity) == ("the board in the kitchen", "/keys/id")


def test_added_board_copies_settings_of_type():
    Path("board_configs", "npu.toml").write_text('[devices]\niree = "vulkan"\n')
    add("kitchen", "root@10.0.0.7", hw_type="npu", runtime="onnxruntime")
    config = choose("kitchen").config
    assert (config.hw_type, config.devices, config.runtime) == ("npu", {"iree": "vulkan"}, "onnxruntime")


def test_added_simulator_has_settings():
    add("small", "sim-f16:memory_limit=64MiB", faults=("corrupt:elements=2",))
    config = choose("small").config
    assert config.is_simulator and config.simulator is not None
    assert (config.simulator.memory_limit, config.simulator.arithmetic) == (64 << 20, "float16")
    assert config.simulator.faults == ("corrupt:elements=2",)
    assert config.hw_type == "sim-f16"


@pytest.mark.parametrize(
    ("name", "address", "more", "message"),
    [
        ("a b", "root@h", {}, "invalid board name"),
        ("../a", "root@h", {}, "invalid board name"),
        ("a.toml", "root@h", {}, "invalid board name"),
        ("farm", "root@h", {}, "invalid board name"),
        ("sim", "root@h", {}, "already exists"),
        ("a", "somewhere", {}, "invalid address"),
        ("a", "sim:memory=3", {}, "unknown setting 'memory'"),
        ("a", "sim:memory_limit=much", {}, "invalid memory_limit"),
        ("a", "sim", {"hw_type": "sim-f16"}, "--runtime-hw-type cannot be given"),
        ("a", "sim", {"connection": {"identity": "/id"}}, "no connection"),
        ("a", "root@h", {"faults": ("crash",)}, "--fault requires a simulator"),
        ("a", "root@h", {"hw_type": "sim"}, "sim is a simulator"),
        ("a", "root@h", {"hw_type": "nothing"}, "unknown board 'nothing'"),
        ("a", "root@h", {"description": "lab \udcff"}, "invalid UTF-8"),
    ],
)
def test_new_board_with_invalid_value_is_rejected(name, address, more, message, boards):
    with pytest.raises(UsageError, match=message):
        add(name, address, **more)
    assert not boards.exists()


def test_board_with_name_of_simulator_is_not_a_simulator():
    add("sim-lab", "root@h")
    Path("board_configs", "sim-npu.toml").write_text('[board]\nhw_type = "npu"\n')
    Path("board_configs", "sim-bad.toml").write_text("[")
    for name in ("sim-lab", "sim-npu", "sim-bad"):
        with pytest.raises(UsageError, match=f"invalid address '{name}'"):
            add("new", name)


@pytest.mark.parametrize("table", ['[runtime]\nkind = "command"\nfile = "run.sh"\n', '[power]\nreset = ["./reset"]\n'])
def test_type_with_relative_path_is_rejected(table, tmp_path, monkeypatch):
    (tmp_path / "types").mkdir()
    (tmp_path / "types" / "vendor.toml").write_text(table)
    monkeypatch.setenv("HIL_BOARDS", str(tmp_path / "types"))
    with pytest.raises(UsageError, match="relative paths"):
        add("a", "root@h", hw_type="vendor")


def test_add_never_replaces_board(boards):
    config = make_board_config(NewBoard("kitchen", "root@one"))
    add("kitchen", "root@two")
    with pytest.raises(UsageError, match="already exists"):
        add("kitchen", "root@three")
    # Another process added the board in the meantime.
    with pytest.raises(UsageError, match="already exists"):
        add_board_file(config)
    assert choose("kitchen").target == "root@two"
    assert [path.name for path in boards.iterdir()] == ["kitchen.toml"]


def test_new_board_takes_precedence_over_working_directory():
    Path("board_configs", "kitchen.toml").write_text('[connection]\naddress = "root@other"\n')
    add("kitchen", "root@mine")
    assert choose("kitchen").target == "root@mine"


def test_unwritable_directory_is_reported(boards):
    boards.parent.mkdir(parents=True)
    boards.write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        add("kitchen", "root@h")


@pytest.mark.parametrize(
    "text",
    [
        '# mine\n[connection]\naddress = "root@h"  # the lab\n',
        '[board]\nname = "old"\nhw_type = "rpi5"\n\n[connection]\naddress = "root@h"\n',
        '[connection]\naddress = "root@h"\n\n[board]\ndescription = "x"\n',
    ],
)
def test_rename_keeps_settings(text, boards):
    boards.mkdir(parents=True)
    (boards / "old.toml").write_text(text)
    before = read_config(boards / "old.toml")
    path = rename_board_file("old", "new")
    after = read_config(path)
    assert [one.name for one in boards.iterdir()] == ["new.toml"]
    assert (after.name, after.hw_type, after.connection) == ("new", before.hw_type, before.connection)
    assert after.description == before.description
    assert ("# mine" in path.read_text()) == ("# mine" in text)


def test_rename_and_remove_reject_other_boards(boards, tmp_path):
    add("kitchen", "root@h")
    add("garage", "root@h")
    with pytest.raises(UsageError, match="board garage already exists"):
        rename_board_file("kitchen", "garage")
    with pytest.raises(UsageError, match="unknown board 'kitchn'") as error:
        remove_board_file("kitchn")
    assert "did you mean 'kitchen'" in error.value.hint
    with pytest.raises(UsageError, match="cannot change board sim"):
        remove_board_file("sim")
    Path("board_configs", "attic.toml").write_text("")
    with pytest.raises(UsageError, match="cannot change board attic: its config is board_configs"):
        rename_board_file("attic", "roof")
    with pytest.raises(UsageError, match="unknown board"):
        find_board_file("../boards/kitchen")
    assert remove_board_file("kitchen") == boards / "kitchen.toml"
    assert [path.name for path in boards.iterdir()] == ["garage.toml"]
