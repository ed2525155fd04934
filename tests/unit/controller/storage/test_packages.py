"""Test plugin packages: hil rejects a broken part only when it is used, and names the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hil.controller.backends.compilers import load_compilers
from hil.controller.backends.references import load_references
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_resolver import open_link
from hil.controller.devices.links.package_links import find_provider
from hil.controller.models.executorch_backends import load_executorch_backends
from hil.controller.models.flows.recipe import load_recipes
from hil.controller.models.importers import import_model, load_importers
from hil.controller.storage.sources.packages import pick
from hil.controller.workloads.bundles.formats import load_formats
from hil.core.boards import load_board
from hil.core.guarded import format_plugin
from hil.errors import BoardUnreachable, UsageError

GROUPS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "hil.references": load_references,
    "hil.importers": load_importers,
    "hil.compilers": load_compilers,
    "hil.executorch_backends": load_executorch_backends,
    "hil.recipes": load_recipes,
    "hil.bundle_formats": load_formats,
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("module", "why"), [("X = 'a text'", "must be a "), ("Y = 1", "AttributeError"), ("1 / 0", "division by zero")]
)
def test_broken_part_fails_only_when_picked(package, group: str, module: str, why: str) -> None:
    before = list(GROUPS[group]())
    package(module, f"[{group}]\nbroken = MODULE:X\n")
    found = GROUPS[group]()
    assert list(found) == before
    with pytest.raises(UsageError, match=rf"'broken' of {group} \(package vendor 1.0\) .*{why}") as caught:
        pick("thing", found, "broken")
    assert "vendor" in caught.value.hint
    with pytest.raises(UsageError, match="thing 'other' not found"):
        pick("thing", found, "other")


def test_broken_part_hides_built_in_part_of_same_name(package) -> None:
    package("X = 3", "[hil.references]\nonnxruntime = MODULE:X\n")
    with pytest.raises(UsageError, match=r"package vendor 1.0\) must be a hil\.plugins\.Reference, got 3"):
        pick("reference", load_references(), "onnxruntime")


@pytest.mark.parametrize(
    ("group", "thing"),
    [
        ("hil.references", "Reference('onnx', str, str)"),
        ("hil.references", "Reference(('onnx',), 'me', str)"),
        ("hil.recipes", "Recipe(lambda: 0)"),
        ("hil.importers", "Importer(('.x',), bool, 3)"),
        ("hil.executorch_backends", "ExecuTorchBackend(lambda program: program)"),
    ],
)
def test_pick_rejects_part_with_invalid_values(package, group: str, thing: str) -> None:
    package(f"from hil.plugins import *\nX = {thing}", f"[{group}]\nbroken = MODULE:X\n")
    with pytest.raises(UsageError, match=r"package vendor 1\.0\) is invalid: "):
        pick("thing", GROUPS[group](), "broken")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("X = 3", "must be a function, got 3"),
        ("Y = 3", "failed: AttributeError"),
        ("X = dict", "failed: TypeError: not a hil.plugins.BoardProvider"),
        ("def X(): raise OSError('no licence')", "failed: OSError: no licence"),
    ],
)
def test_board_provider_failure_names_package(package, module: str, why: str) -> None:
    package(module, "[hil.board_providers]\nlab = MODULE:X\n")
    with pytest.raises(
        (UsageError, BoardUnreachable), match=rf"'lab' of hil.board_providers \(package vendor 1.0\) {why}"
    ):
        find_provider("lab:any")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("X = 3", "must be a function, got 3"),
        ("def X(address, config): return 3", "failed: TypeError: it returned 3: expected Link"),
    ],
)
def test_link_failure_names_package(package, module: str, why: str) -> None:
    package(module, "[hil.links]\nusb = MODULE:X\n")
    with pytest.raises((UsageError, BoardUnreachable), match=rf"'usb' of hil.links \(package vendor 1.0\) {why}"):
        open_link(BoardChoice(load_board("generic").config, "usb:3"))


def test_importer_failure_falls_back_to_other_importers(package, tmp_path: Path) -> None:
    package(
        "from hil.plugins import Importer\nX = Importer(('.x',), lambda head: head.no, 'm:f')",
        "[hil.importers]\nodd = MODULE:X\nbroken = MODULE:Y\n",
    )
    (tmp_path / "m.what").write_bytes(b"?")
    with pytest.raises(UsageError, match="unsupported model format: ") as caught:
        import_model(tmp_path / "m.what")
    assert "'broken' of hil.importers" in caught.value.hint


def test_called_names_package_of_external_parts(package) -> None:
    package("", "[hil.recipes]\nround = MODULE:X\n")
    assert format_plugin("recipe", "hil.recipes", "round") == "the recipe round of the package vendor 1.0"
    assert format_plugin("recipe", "hil.recipes", "float16") == "the recipe float16"
