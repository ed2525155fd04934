"""Repeated options expand to targets with unique names."""

from __future__ import annotations

import pytest

from hil.controller.workloads.matrix.targets import combine_targets
from hil.errors import UsageError


def named(**axes: list[str]) -> list[str]:
    return [target.name for target in combine_targets(axes)]


def test_targets_combine_every_axis():
    targets = combine_targets({"hw_type": ["sim", "sim-f16"], "flow": ["iree", "onnxruntime"]})
    assert [target.name for target in targets] == [
        "iree-sim",
        "iree-sim-f16",
        "onnxruntime-sim",
        "onnxruntime-sim-f16",
    ]
    assert targets[1].options == {"flow": "iree", "hw_type": "sim-f16"}


def test_target_names_contain_differences_only():
    assert named(flow=["iree"], hw_type=["sim", "sim-f16"]) == ["sim", "sim-f16"]
    assert named(flow=["iree", "mine.toml:fast", "some/where/other.toml"]) == ["iree", "fast", "other"]


@pytest.mark.parametrize("axes", [{}, {"flow": [], "board": []}, {"flow": ["iree"], "hw_type": ["sim"]}])
def test_unrepeated_options_make_single_target(axes: dict[str, list[str]]):
    assert len(combine_targets(axes)) == 1


def test_target_names_are_unique_directory_names():
    assert named(board=["root@10.0.0.7:22", "../x", "unix:/run/a b"]) == ["root_10.0.0.7_22", "_x", "unix__run_a_b"]
    assert named(flow=["a.toml:fast", "b.toml:Fast"]) == ["fast", "Fast-2"]


def test_targets_reject_repeated_value():
    with pytest.raises(UsageError, match="duplicate --runtime-hw-type sim"):
        combine_targets({"hw_type": ["sim", "sim"]})
