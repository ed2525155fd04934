"""Test failures of package parts: each raises an error of its stage that names the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.broken_package import WAYS, install, save_relu

from hil.controller.backends.compilers import compile_model
from hil.controller.backends.references import run_reference
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_resolver import choose, open_link
from hil.controller.devices.links.package_links import find_provider
from hil.controller.models.executorch_backends import lower, make_quantizer, pick_backend
from hil.controller.models.flows.flow_registry import load_flow
from hil.controller.models.flows.recipe import apply_recipe
from hil.controller.models.importers import import_model
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.formats import read_format, write_format
from hil.core.boards import load_board
from hil.errors import BoardUnreachable, CompileFailed, HilError, ImportFailed, ReferenceFailed, StageError, UsageError


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


class Parts:
    """Call a part of the package in a failing way."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings

    def model(self, name: str) -> Any:
        return import_model(save_relu(self.folder / f"{name}.onnx"), **self.pool("isolated", "cache"))

    def pool(self, *names: str) -> dict[str, Any]:
        return {name: self.settings[name] for name in names}

    def compilers(self, way: str) -> None:
        order = {"runtime": "acme", "flags": (), "debug_ir": None, **self.settings}
        compile_model(self.model(f"compile-{way}"), compiler="acme", **order)

    def references(self, way: str) -> None:
        run_reference("acme", self.model(f"refer-{way}"), {}, **self.settings)

    def importers(self, way: str) -> None:
        import_model(save_relu(self.folder / f"reads-{way}.odd"), **self.pool("isolated", "cache"))

    def recipes(self, way: str) -> None:
        context = RunContext(self.settings["cache"], self.settings["isolated"])
        apply_recipe(load_flow("acme"), save_relu(self.folder / f"recipe-{way}.onnx"), (), context, self.folder / "log")

    def links(self, way: str) -> None:
        open_link(BoardChoice(load_board("generic").config, f"usb:{way}"))

    def board_providers(self, way: str) -> None:
        open_link(choose(f"lab:{way}"))

    def loans(self, way: str) -> None:
        provider, selector = find_provider(f"lab:{way}")
        assert provider.order(selector, "").name

    def bundle_formats(self, way: str) -> None:
        read_format("acme", self.folder / f"read-{way}", context=RunContext(None, None))  # type: ignore[arg-type]

    def lowering(self, way: str) -> None:
        lower("acme", None, {"how": way})

    def quantizers(self, way: str) -> None:
        make_quantizer("acme", True, False, {"how": way})


FAILURES: dict[str, type[HilError]] = {
    "compilers": CompileFailed,
    "references": ReferenceFailed,
    "importers": ImportFailed,
    "recipes": ImportFailed,
    "links": BoardUnreachable,
    "board_providers": BoardUnreachable,
    "loans": BoardUnreachable,
    "bundle_formats": ImportFailed,
    "lowering": CompileFailed,
    "quantizers": ImportFailed,
}
# ExecuTorch checks what these return.
UNSEEN = {("lowering", "none"), ("lowering", "wrong"), ("quantizers", "none"), ("quantizers", "wrong")}


@pytest.mark.ci
@pytest.mark.parametrize(("part", "way"), [(p, w) for p in FAILURES for w in WAYS if (p, w) not in UNSEEN])
def test_package_failure_raises_error_of_stage(part: str, way: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(FAILURES[part]) as caught:
        getattr(Parts(tmp_path, settings), part)(way)
    assert "acme 1.2" in caught.value.message


def test_bundle_write_failure_names_package(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"the bundle format acme of the package acme 1\.2 failed: SystemExit: 7"):
        write_format("acme", None, tmp_path / "write-exit", context=None)  # type: ignore[arg-type]


def test_backend_import_failure_raises_usage_error() -> None:
    with pytest.raises(UsageError, match=r"\(package acme 1\.2\) failed: ModuleNotFoundError"):
        pick_backend("missing")
