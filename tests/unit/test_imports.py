"""The imports of a command. Imports come first in its run time, so unused modules stay out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import DIGITS

from hil.controller.models.conversions import CONVERSIONS
from hil.controller.models.importers import _BUILT_IN as IMPORTERS
from hil.core.named import resolve
from hil.core.runtimes import RUNTIMES

# Modules that a run of an ONNX model on a simulator does not use if everything is cached.
NOT_NEEDED = (
    "grpc ml_dtypes onnx onnxruntime iree torch tensorflow perfetto matplotlib paramiko cryptography "
    "rich.progress rich.live tenacity statistics "
    "hil.controller.models.tensorflow hil.controller.models.conversions.torch_program "
    "hil.controller.models.conversions.tensorflow_program hil.controller.models.importers.onnx "
    "hil.controller.backends.compilers.tensorflow.tfcompile hil.controller.backends.compilers.executorch "
    "hil.controller.backends.references.runners.iree_llvm_cpu hil.controller.backends.references.runners.torch_eager "
    "hil.controller.models.flows hil.controller.models.executorch_backends hil.controller.analysis "
    "hil.controller.devices.deploy.packages hil.controller.workloads.suites hil.controller.farm hil.controller.web"
).split()


def imported(*words: object, cwd: Path) -> set[str]:
    """Return the modules that a successful command has imported at exit."""
    script = (
        "import atexit, sys; from hil.controller.cli.main import call\n"
        "code = call(); print('imported', *sys.modules, file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", script, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # A run whose data connections failed imports gRPC and reports why.
    assert "went over gRPC" not in done.stdout + done.stderr, done.stdout
    return set(done.stderr.splitlines()[-1].split()[1:])


def test_run_command_imports_only_needed_modules(environment, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = ("run", DIGITS / "digits_cnn.onnx", "--runtime-hw-type", "sim", "--json")
    imported(*run, cwd=tmp_path)  # fills the cache
    there = imported(*run, cwd=tmp_path)
    assert "hil.controller.pipeline.stages" in there
    assert there.isdisjoint(NOT_NEEDED), sorted(there & set(NOT_NEEDED))
    assert not any(name.startswith("rich.") for name in there), "rich is for what is printed, and --json is not"
    shown = imported(*run[:-1], cwd=tmp_path)
    assert "rich.text" in shown and "rich.table" not in shown, "a case is shown in lines of text"
    tables = [name for name in shown if "_unicode_data.unicode" in name or name == "rich._emoji_codes"]
    assert not tables, "rich reads tables of thousands of characters for none of what is shown"


def test_help_imports_neither_tensors_nor_records(tmp_path):
    assert imported("--help", cwd=tmp_path).isdisjoint({"numpy", "msgspec", "hil.core.results"})


@pytest.mark.parametrize("line", ["hil ", "hil run --board s", "hil run --reference o", "hil runs show "])
def test_completion_imports_no_heavy_module(tmp_path, monkeypatch, line):
    monkeypatch.setenv("_HIL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_LINE", line)
    there = imported(cwd=tmp_path)
    heavy = {*NOT_NEEDED, "rich", "requests", "asyncio"} - {"hil.controller.models.flows", "tenacity", "statistics"}
    assert there.isdisjoint(heavy), sorted(there & heavy)


def names() -> Iterator[str]:
    yield from (conversion.convert for conversion in CONVERSIONS.values())
    yield from (conversion.debug for conversion in CONVERSIONS.values() if conversion.debug)
    yield from (importer.describe for importer in IMPORTERS.values() if isinstance(importer.describe, str))
    yield from (info.compile for info in RUNTIMES.values() if info.compile)


@pytest.mark.parametrize("name", sorted(set(names())))
def test_lazily_imported_names_resolve(name: str):
    assert callable(resolve(name))
