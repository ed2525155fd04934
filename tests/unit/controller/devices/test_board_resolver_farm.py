"""`farm:SELECTOR` and HIL_BOARD as choices of a board; fences in configs."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hil.controller.cli.times import parse_duration
from hil.controller.devices.board_choice import BoardChoice, is_provider_address, knows_target, pin_choice
from hil.controller.devices.choosing.board_resolver import choose, is_address
from hil.controller.farm.selector import parse
from hil.controller.models.flows.flow import Flow
from hil.controller.storage.sources.packages import pick
from hil.controller.workloads.suites import tasks
from hil.controller.workloads.suites.preparing import use_flow_device
from hil.controller.workloads.suites.tasks import BoardSlot, LeasedSlot, RunState, TaskQueue, make_slots
from hil.core import boards
from hil.core.board_config import BoardConfig
from hil.core.board_parser import parse_board
from hil.errors import UsageError


@pytest.mark.parametrize(
    ("board", "hw_type", "address"),
    [
        ("farm:", "", "farm:"),
        ("farm: chip=a53, mem>=1GiB ", "", "farm:chip=a53, mem>=1GiB"),
        ("farm:", "sim", 'farm:hw_type="sim"'),
        ("farm:a or b", "sim-f16", 'farm:(a or b), hw_type="sim-f16"'),
    ],
)
def test_farm_choice_uses_selector_and_type(board: str, hw_type: str, address: str) -> None:
    choice = choose(board, hw_type)
    assert is_address(board)
    assert choice.name == choice.address == choice.config.connection.address == address
    assert choice.config.hw_type == (hw_type or "farm")
    # The board may have additional flags even for a runtime with portable programs.
    assert not any(knows_target(choice.config, runtime) for runtime in ("iree", "onnxruntime", "tflite"))


def test_type_narrows_farm_selector() -> None:
    selector = parse(choose("farm:a or b", "sim").address.removeprefix("farm:"))
    assert selector.matches({"a": True, "hw_type": "sim"})
    assert not selector.matches({"a": True, "hw_type": "rpi4"})
    assert not selector.matches({"hw_type": "sim"})


def test_pinned_choice_names_leased_board() -> None:
    choice = pin_choice(choose("farm:a or b", "sim"), "lab1-sim-3")
    assert choice.name == 'farm:name="lab1-sim-3"'
    assert parse(choice.address.removeprefix("farm:")).matches({"name": "lab1-sim-3"})
    other = choose("unix:/a")
    assert pin_choice(other, "lab1-sim-3") is other


def test_config_may_address_farm(tmp_path: Path) -> None:
    path = tmp_path / "a53.toml"
    path.write_text('[connection]\naddress = "farm:chip=a53"\n')
    choice = choose(str(path))
    assert (choice.name, is_provider_address(choice.config.connection.address)) == ("a53", True)
    assert not knows_target(choice.config, "onnxruntime")
    assert pin_choice(choice, "lab1").config.connection.address == 'farm:name="lab1"'


def test_hil_board_variable_sets_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_BOARD", "unix:/leased.sock")
    assert choose().name == "unix:/leased.sock"
    assert choose("unix:/other.sock").name == "unix:/other.sock"
    assert choose("", "sim-f16").name == "sim-f16"
    monkeypatch.setenv("HIL_BOARD", "")
    assert choose().name == "sim"


def test_config_parses_fence() -> None:
    text = '[connection]\naddress = "unix:/a"\nfence = {}\n'
    assert parse_board(text.format(12), Path("x.toml")).connection.fence == 12
    assert parse_board("", Path("x.toml")).connection.fence == 0
    for wrong in ("-1", "1.5", "true", '"12"', str(1 << 63)):
        with pytest.raises(UsageError, match=r"\[connection\] fence must be a"):
            parse_board(text.format(wrong), Path("x.toml"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30m", 1800), ("90s", 90), ("1h30m", 5400), ("1.5h", 5400), ("90", 90), ("1w", 604800)],
)
def test_duration_parses_times(text: str, seconds: float) -> None:
    assert parse_duration(text, "--for") == seconds


@pytest.mark.parametrize("text", ["", "soon", "0s", "-3m", "30 m", "m", "30mm", "5000d", "9" * 400])
def test_duration_rejects_invalid_times(text: str) -> None:
    with pytest.raises(UsageError, match="invalid --for"):
        parse_duration(text, "--for")


def test_selector_gets_requested_number_of_slots() -> None:
    slots = make_slots([choose("farm:gpu"), choose("unix:/a")], 3, "a test", 60)
    assert [(type(slot), slot.name) for slot in slots] == [
        (LeasedSlot, "farm:gpu (1)"),
        (LeasedSlot, "farm:gpu (2)"),
        (LeasedSlot, "farm:gpu (3)"),
        (BoardSlot, "unix:/a"),
    ]
    named = choose("unix:/a")
    by_config = BoardChoice(
        replace(named.config, connection=replace(named.config.connection, address="farm:gpu")), address=""
    )
    assert [slot.lent for slot in make_slots([by_config], 2, "a test", 60)] == [True, True]


def test_leased_board_uses_device_of_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    loan = SimpleNamespace(name="lab1", config=BoardConfig("lab1", "sim"), wait=lambda seconds: True)
    provider = SimpleNamespace(order=lambda selector, purpose: loan)
    monkeypatch.setattr(tasks, "find_provider", lambda address: (provider, ""))
    (slot,) = make_slots(use_flow_device([choose("farm:gpu")], Flow("gpu", "iree", "vulkan")), 1, "a test", 60)
    leased = slot.take(RunState(lambda: False, lambda: False, lambda text: None))
    assert leased is not None and leased.config.devices == {"iree": "vulkan"}


def test_queue_renames_waiting_slot() -> None:
    from hil.controller.pipeline.case import Case
    from hil.controller.pipeline.settings.options import Options
    from hil.controller.workloads.suites.tasks import Task

    queue = TaskQueue(["farm: (1)", "b"])
    task = Task(Case("x", Path("x"), Options(), Path()), boards=("farm: (1)",))
    assert queue.put(task)
    queue.rename("farm: (1)", "lab1-sim-3")
    assert queue.alive == ("lab1-sim-3", "b")
    assert queue.take("lab1-sim-3") is task
    assert task.boards == ("lab1-sim-3",)


def test_queue_rename_waits_for_previous_slot() -> None:
    queue = TaskQueue(["lab1-sim-1", "farm: (2)"])
    renaming = threading.Thread(target=queue.rename, args=("farm: (2)", "lab1-sim-1"), daemon=True)
    renaming.start()
    renaming.join(0.2)
    assert queue.alive == ("lab1-sim-1", "farm: (2)")
    queue.rename("lab1-sim-1", "farm: (1)")
    renaming.join(30)
    assert queue.alive == ("farm: (1)", "lab1-sim-1")
    # A named board has its final name from the start.
    queue.rename("lab1-sim-1", "lab1-sim-1")
    assert queue.alive == ("farm: (1)", "lab1-sim-1")


def test_invalid_hil_board_error_names_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as typed:
        choose("nonsense")
    assert typed.value.message == "unknown board 'nonsense'"
    monkeypatch.setenv("HIL_BOARD", "nonsense")
    with pytest.raises(UsageError) as named:
        choose()
    assert named.value.message == "unknown board 'nonsense'; set by the variable HIL_BOARD"


def test_unknown_board_error_lists_known_boards_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "list_boards", dict)
    with pytest.raises(UsageError) as caught:
        choose("nonsense")
    assert caught.value.hint.startswith("USER@HOST")
    with pytest.raises(UsageError) as caught:
        pick("importer", {}, "nonsense")
    assert caught.value.hint == ""
