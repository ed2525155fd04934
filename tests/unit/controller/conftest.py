"""Provide small models built in code, and a pool of isolated processes for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated


@pytest.fixture(scope="session")
def isolated() -> Iterator[Isolated]:
    with Isolated(2) as pool:
        yield pool


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def settings(cache: Cache, isolated: Isolated, tmp_path: Path) -> dict[str, Any]:
    """Return the arguments shared by compilers and references."""
    return {"cache": cache, "isolated": isolated, "recompute": False, "timeout": 120.0, "log": tmp_path / "stage.log"}


@pytest.fixture
def save_onnx(tmp_path: Path) -> Callable[..., Path]:
    """save_onnx(nodes, inputs, outputs, initializers) writes a model; inputs and outputs are (name, type, shape)."""

    def save(
        nodes: list[Any],
        inputs: list[tuple[str, int, Any]],
        outputs: list[tuple[str, int, Any]],
        initializers: list[Any] | tuple[Any, ...] = (),
        *,
        name: str = "model.onnx",
        opset: int = 17,
        graph: str = "net",
        functions: list[Any] | None = None,
        domains: tuple[str, ...] = (),
    ) -> Path:
        proto = helper.make_model(
            helper.make_graph(
                nodes,
                graph,
                [helper.make_tensor_value_info(*value) for value in inputs],
                [helper.make_tensor_value_info(*value) for value in outputs],
                initializer=list(initializers),
            ),
            opset_imports=[helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)],
            functions=functions or [],
        )
        proto.ir_version = 10  # the version that onnxruntime supports; onnx writes a newer one
        path = tmp_path / name
        onnx.save(proto, path)
        return path

    return save


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a fake package with entry points and modules."""

    def install(module: str, points: str) -> None:
        site = tmp_path / "site"
        info = site / "vendor-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        name = f"vendor_{abs(hash(module))}"
        (site / f"{name}.py").write_text(module)
        (info / "entry_points.txt").write_text(points.replace("MODULE", name))
        monkeypatch.syspath_prepend(str(site))

    return install
