"""File reads use hil.core.files, which accepts only regular files and limits their size."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import pytest
from support.sources import iter_trees

# Functions that read a file by path: methods of Path, and functions of modules.
_METHODS = {"read_text", "read_bytes"}
_FUNCTIONS = {
    *("io.open", "gzip.open", "lzma.open", "bz2.open", "tarfile.open", "zipfile.ZipFile", "sqlite3.connect"),
    *(
        "np.load",
        "np.fromfile",
        "np.loadtxt",
        "np.genfromtxt",
        "np.memmap",
        "onnx.load",
        "onnx.load_model",
        "json.load",
    ),
    *("json.load", "tomllib.load", "pickle.load", "torch.load", "torch.export.load", "keras.saving.load_model"),
    *("tf.saved_model.load", "shutil.copyfile", "shutil.copy", "shutil.copy2", "shutil.copytree", "shutil.move"),
}
# Names of values whose `open` method does not open a file.
_NO_FILES = {"self", "login", "connection", "engine", "pool", "_far", "_target", "sftp", "archive", "_zip"}
_KERNEL = "files of the kernel"
_PACKAGE = "files of hil, or of an installed package"
_BOARD = "runs on a board, without hil"
_OPENED = "takes a file that open_file opened"
_CHECKED = "takes a path that open_file accepted before"
_OWN = "files that hil made, in a place of its own"
_WRITES = "writes only"
_PIPE = "named by the user on the command line or in ssh's config: may be a pipe or /dev/null"
# Functions that may read files in another way: file and function -> reason.
ALLOWED = {
    "agent/__main__.py:read_config": _PIPE,
    "agent/confinement.py:confine": _KERNEL,
    "agent/forks.py:_become_server": _KERNEL,
    "agent/instructions.py:_explain": _KERNEL,
    "agent/machine.py:_read_bytes": _KERNEL,
    "agent/machine.py:_read_text": _KERNEL,
    "agent/stack.py:_read_lines": _KERNEL,
    "controller/analysis/profile/perfetto.py:_load_rpc_class": _PACKAGE,
    "controller/backends/compilers/iree_failure.py:keep_failure": _OWN,
    "controller/backends/compilers/tensorflow/tfcompile.py:compile_tfcompile": _OWN,
    "controller/devices/deploy/board_side.py:BoardDirectory.running": _BOARD,
    "controller/devices/deploy/board_side.py:record": _BOARD,
    "controller/devices/deploy/board_side.py:unpack": _BOARD,
    "controller/devices/deploy/board_side.py:wait_until_up": _BOARD,
    "controller/devices/deploy/ensure.py:install": _PACKAGE,
    "controller/devices/deploy/packages.py:_write_archive": _WRITES,
    "controller/devices/deploy/packages.py:own_files": _PACKAGE,
    "controller/devices/deploy/packages.py:iter_wheel_files": _PACKAGE,
    "controller/devices/deploy/probe.py:_run_probe": _PACKAGE,
    "controller/devices/deploy/vendor_packages.py:_read_metadata": _OPENED,
    "controller/devices/deploy/vendor_packages.py:build_wheel": _PACKAGE,
    "controller/devices/deploy/wheels.py:_fill": _PACKAGE,
    "controller/devices/links/kept_simulators.py:_digest_kind": _KERNEL,
    "controller/devices/ssh/tunnel.py:_start_helper": _PACKAGE,
    "controller/farm/client/machine.py:get_machine_id": _KERNEL,
    "controller/farm/local/processes.py:start_time": _KERNEL,
    "controller/farm/database/database.py:_read_sql_files": _PACKAGE,
    "controller/farm/database/database.py:list_shipped_schemas": _PACKAGE,
    "controller/farm/database/embedded_database.py:EmbeddedDatabase._find_leftovers": _KERNEL,
    "controller/farm/database/unprivileged.py:_enter_namespace": _KERNEL,
    "controller/models/importers/onnx.py:limit_memory": _KERNEL,
    "controller/models/importers/onnx_data.py:_map_external": _OPENED,
    "controller/models/importers/exported/pt2_archive.py:_check": _OPENED,
    "controller/models/importers/exported/pt2_archive.py:load_program": _CHECKED,
    "controller/models/tensorflow/source.py:_open_keras": _CHECKED,
    "controller/models/tensorflow/source.py:_open_saved": _CHECKED,
    "controller/storage/history/sqlite_database.py:_open_file": _CHECKED,
    "controller/storage/sources/own_code.py:digest_code": _PACKAGE,
    "controller/storage/runs.py:RunStore._list_indexed": _CHECKED,
    "controller/storage/tensor_files.py:save_npz": _WRITES,
    "controller/web/index/index.py:IndexReader._get_connection": _OWN,
    "controller/web/index/index.py:_connect_index": _OWN,
    "controller/web/access/peers.py:_find_row": _KERNEL,
    "controller/workloads/plugin_check/packages.py:open_package": _OPENED,
    "controller/workloads/study/toolchains.py:Making.keep": _OWN,
    "controller/workloads/suites/cases/operators.py:make_operator_cases": _OWN,
    "controller/workloads/suites/cases/operators.py:write_archive": _WRITES,
    "controller/workloads/suites/reports/page.py:_read_asset": _PACKAGE,
    "controller/workloads/suites/zoo/__init__.py:build_zoo_models": _PACKAGE,
    "core/files.py:copy_file": _CHECKED,
    "core/files.py:open_file": "checks the file that it opens",
    "core/installed.py:_read_text": _PACKAGE,
    "core/npy.py:Npz.__init__": _OPENED,
    "core/npy.py:read_npy": _OPENED,
    "core/processes.py:_map_children": _KERNEL,
    "core/processes.py:list_children": _KERNEL,
    "sim/faults.py:SimClock.__init__": _OWN,
    "sim/faults.py:watch_for_end.watch": "waits on a pipe",
    "sim/runtime.py:SimOnnxRuntime.convert_arithmetic": _OWN,
    "testing/pytest_plugin/running.py:CaseRun._make_record": _OWN,
}


def reads(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each call that reads a file by path: (enclosing function, called function)."""

    def visit(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from visit(child, (*inside, child.name))
                continue
            if isinstance(child, ast.Call) and (called := read_by(child)):
                yield ".".join(inside) or "<module>", called
            yield from visit(child, inside)

    return visit(tree, ())


def read_by(call: ast.Call) -> str:
    """Return the name of the function that reads the file, or "" if the call does not read a file."""
    if isinstance(call.func, ast.Name):
        return "open" if call.func.id == "open" else ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    name, owner = call.func.attr, ast.unparse(call.func.value)
    if f"{owner}.{name}" in _FUNCTIONS:
        return f"{owner}.{name}"
    if name in _METHODS and owner != "files":
        return name
    return "open" if name == "open" and not _opens_no_file(call.func.value) and _may_read(call) else ""


def _opens_no_file(owner: ast.expr) -> bool:
    """Return whether a value with an `open` method is not a path, judged by its name or class."""
    if isinstance(owner, ast.Call):
        return ast.unparse(owner.func).lstrip("_")[0].isupper() and ast.unparse(owner.func) != "Path"
    return ast.unparse(owner).rpartition(".")[2] in _NO_FILES


def _may_read(call: ast.Call) -> bool:
    """Return whether a call of an `open` method may read a Path."""
    modes = [*call.args, *(one.value for one in call.keywords if one.arg == "mode")]
    if not modes:
        return True
    return isinstance(modes[0], ast.Constant) and isinstance(modes[0].value, str) and set(modes[0].value) <= set("rbt+")


@functools.cache
def found() -> dict[str, set[str]]:
    """Return the reads in hil: file and function -> called functions."""
    names = {"open", *_METHODS, *(name.rpartition(".")[2] for name in _FUNCTIONS)}
    by_place: dict[str, set[str]] = {}
    for path, tree in iter_trees(rf"\b({'|'.join(names)})\("):
        for function, called in reads(tree):
            by_place.setdefault(f"{path}:{function}", set()).add(called)
    return by_place


def test_hil_reads_files_only_through_core_files():
    unknown = {place: sorted(called) for place, called in found().items() if place not in ALLOWED}
    assert not unknown, "use open_file, read_file, read_text, read_end, map_file or copy_file of hil.core.files"


def test_file_read_exceptions_are_all_in_use():
    assert sorted(set(ALLOWED) - set(found())) == []


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("def f(): Path(x).read_text()", "read_text"),
        ("def f(): open(x)", "open"),
        ("def f(): path.open()", "open"),
        ("def f(): path.open('rb')", "open"),
        ("def f(): np.load(x)", "np.load"),
        ("def f():\n with zipfile.ZipFile(x): pass", "zipfile.ZipFile"),
        ("def f(): path.open('wb')", ""),
        ("def f(): files.read_text(x)", ""),
        ("def f(): store.open(name)", ""),
    ],
)
def test_file_read_rule_detects_reads(text, called):
    assert list(reads(ast.parse(text))) == ([("f", called)] if called else [])
