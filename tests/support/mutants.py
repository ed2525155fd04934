"""Mutation testing: run tests on modules with deliberate mistakes. At least one test must detect each mistake.

``python tests/support/mutants.py`` reads
``{"tests": [FILE...], "warm": [MODULE...], "mutants": [{"module": NAME,
"changes": [[TEXT, INSTEAD]...], "select": EXPRESSION}...]}``
from stdin and writes a line of JSON for each mutant when it ends.
The process imports everything except the mutated modules once. Each mutant is a fork of this process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import one module from a changed text, without writing a file."""

    def __init__(self, module: str, changes: Sequence[tuple[str, str]]) -> None:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        self.module, self.origin = module, spec.origin
        self.text = Path(spec.origin).read_text()
        for text, instead in changes:
            count = self.text.count(text)
            if count != 1:
                raise ValueError(f"{module} has {text!r} {count} times")
            self.text = self.text.replace(text, instead)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, origin=self.origin) if name == self.module else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.text, self.origin, "exec"), module.__dict__)


class FirstFailure:
    """A pytest plugin that stores the first failure, and counts passed tests."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"test": "", "message": "", "passed": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.found["passed"] += report.when == "call" and report.passed
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self.found["test"]:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.found.update(test=report.nodeid, message=crash.message if crash else str(report.longrepr))


def run_mutant(module: str, changes: Sequence[tuple[str, str]], tests: Sequence[str], select: str) -> dict[str, Any]:
    """Run some of the tests until one fails. The mutated modules must not have been imported."""
    sys.meta_path.insert(0, Mutated(module, changes))
    importlib.import_module(module)
    first = FirstFailure()
    own = ["-c", os.devnull, "--rootdir", str(Path(tests[0]).parent), "--noconftest", "--import-mode=importlib"]
    # Rewriting the assertions takes longer than the tests.
    quiet = ["-x", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:terminal"]
    exit_code = int(pytest.main([*own, *quiet, "-k", select, *tests], plugins=[first]))
    return {"exit_code": exit_code, **first.found}


def main() -> None:
    order = json.load(sys.stdin)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # A plugin can make pytest import a module that will be mutated.
    for name in order["warm"]:
        importlib.import_module(name)
    for mutant in order["mutants"]:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            answer: dict[str, Any] = {"exit_code": None, "test": "", "message": "the mutant's process died"}
            with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                try:
                    answer = run_mutant(tests=order["tests"], **mutant)
                except Exception as error:
                    answer["message"] = f"{type(error).__name__}: {error}"
            os.write(write, json.dumps(answer).encode()[: 1 << 15])
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            print(pipe.read().decode() or "null", flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
