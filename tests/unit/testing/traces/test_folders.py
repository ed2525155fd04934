"""Each module has a separate artifact directory."""

from __future__ import annotations

import functools

import pytest

from hil.errors import UsageError
from hil.testing.traces.folders import choose_module_name, claim_folder, identify_owner


def test_claim_gives_modules_separate_stable_directories(tmp_path):
    for file in ("test_a.py", "test_b.py"):
        (tmp_path / file).touch()
    artifacts = tmp_path / "made"
    first, second = "../test_a.py::Test", "../test_b.py::Test"
    assert claim_folder(artifacts, "ResNet50/cifar10", first) == artifacts / "ResNet50" / "cifar10"
    (artifacts / "ResNet50" / "cifar10").mkdir(parents=True)
    assert claim_folder(artifacts, "ResNet50/cifar10", second) == artifacts / "ResNet50" / "cifar10_1"
    (artifacts / "ResNet50" / "cifar10_1").mkdir()
    again = [claim_folder(artifacts, "ResNet50/cifar10", owner).name for owner in (second, first)]
    assert again == ["cifar10_1", "cifar10"]
    # A directory is free after the test or the directory was deleted.
    (tmp_path / "test_a.py").unlink()
    assert claim_folder(artifacts, "ResNet50/cifar10", "../test_b.py::Other").name == "cifar10"
    (artifacts / "modules.json").write_text("[]")
    assert claim_folder(artifacts, "ResNet50/cifar10", second).name == "cifar10"


def test_owner_of_returns_path_relative_to_artifacts(tmp_path):
    owner = identify_owner(claim_folder, tmp_path / "hil-traces")
    assert owner.startswith("../") and owner.endswith("traces/folders.py::claim_folder")


@pytest.mark.parametrize("name", ["/tmp/x", "../x", "a/../../x", "."])
def test_module_name_rejects_path_outside_artifacts(name):
    with pytest.raises(UsageError, match="invalid module name"):
        choose_module_name(dict, name)


def test_module_name_requires_a_name():
    with pytest.raises(UsageError, match="missing module name for"):
        choose_module_name(functools.partial(dict, a=1))
    assert choose_module_name(functools.partial(dict, a=1), "Vision/small") == "Vision/small"
