"""Repeated options make targets: every combination, each with a name of its own."""

from __future__ import annotations

import pytest

from hil.controller.workloads.matrix.targets import targets_of
from hil.errors import UsageError


def named(**axes: list[str]) -> list[str]:
    return [target.name for target in targets_of(axes)]


def test_every_combination_is_a_target_and_the_last_axis_changes_first():
    targets = targets_of({"hw_type": ["sim", "sim-f16"], "flow": ["iree", "onnxruntime"]})
    assert [target.name for target in targets] == [
        "iree-sim",
        "iree-sim-f16",
        "onnxruntime-sim",
        "onnxruntime-sim-f16",
    ]
    assert targets[1].options == {"flow": "iree", "hw_type": "sim-f16"}


def test_a_name_has_only_what_targets_differ_in():
    assert named(flow=["iree"], hw_type=["sim", "sim-f16"]) == ["sim", "sim-f16"]
    assert named(flow=["iree", "mine.toml:fast", "some/where/other.toml"]) == ["iree", "fast", "other"]


@pytest.mark.parametrize("axes", [{}, {"flow": [], "board": []}, {"flow": ["iree"], "hw_type": ["sim"]}])
def test_options_that_do_not_repeat_are_one_target(axes: dict[str, list[str]]):
    assert len(targets_of(axes)) == 1


def test_names_are_those_of_folders_and_no_two_are_alike():
    assert named(board=["root@10.0.0.7:22", "../x", "unix:/run/a b"]) == ["root_10.0.0.7_22", "_x", "unix__run_a_b"]
    assert named(flow=["a.toml:fast", "b.toml:Fast"]) == ["fast", "Fast-2"]


def test_a_value_is_given_once():
    with pytest.raises(UsageError, match="--runtime-hw-type sim is given twice"):
        targets_of({"hw_type": ["sim", "sim"]})
