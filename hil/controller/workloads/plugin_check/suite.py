"""Run all checks of a package, each in a worker process with a time limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.controller.records.commands.plugins import PluginReport, PluginViolation, SkippedCheck
from hil.controller.storage.isolation.isolated import Isolated, IsolatedCrash, IsolatedError, IsolatedTimeout
from hil.controller.workloads.plugin_check import board_imports, compilers, entry_points, references, runtimes
from hil.controller.workloads.plugin_check.packages import CheckedPackage, RegisteredPoint
from hil.controller.workloads.plugin_check.rules import RULES
from hil.controller.workloads.plugin_check.small_models import SMALL_MODELS, write_unsupported
from hil.core.runtimes import COMPILER_GROUP, RUNTIME_GROUP
from hil.core.text import TextSink
from hil.errors import EXIT_FAIL, EXIT_OK, HilError, did_you_mean

_BOARD_CONFIGS, _REFERENCES = "hil.board_configs", "hil.references"
# Rules whose violation means that a program does not run.
_NOT_RUNNING = {"load-program", "methods", "run", "crash", "timeout"}


def check_package(package: CheckedPackage, folder: Path, *, timeout_s: float, say: TextSink) -> PluginReport:
    """Check a package's entry points. Crashes, hangs and errors of the package become violations.

    Args:
        folder: an empty directory for models, programs and logs.
        timeout_s: time limit of each call.
    """
    with Isolated(1, folders=package.folders) as isolated:
        suite = _Suite(package, folder, timeout_s, isolated)
        for point in package.points:
            say(f"checking {point.text}")
            suite.check_point(point)
    return PluginReport(
        package=package.name,
        version=package.version,
        checks=suite.checks,
        entry_points=[point.text for point in package.points],
        violations=suite.violations,
        skipped=suite.skipped,
        exit_code=EXIT_FAIL if suite.violations else EXIT_OK,
    )


@dataclass
class _Suite:
    package: CheckedPackage
    folder: Path
    timeout_s: float
    isolated: Isolated
    checks: int = 0
    violations: list[PluginViolation] = field(default_factory=list)
    skipped: list[SkippedCheck] = field(default_factory=list)
    # Runtime -> programs that the package's compiler made.
    programs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def check_point(self, point: RegisteredPoint) -> None:
        """Check an entry point. Compilers come before runtimes, because groups are sorted by name."""
        if point.group not in entry_points.GROUPS:
            known = did_you_mean(point.group, entry_points.GROUPS).rstrip()
            self._note(point, [["group", f"{point.group} is not a group of hil. {known}".rstrip(". ")]])
            return
        if point.group == _BOARD_CONFIGS:
            self._note(point, self._call(entry_points.check_board_configs, {"value": point.value}, "board-config"))
            return
        names = {"name": point.name, "package": self.package.name}
        problems = self._call(entry_points.check_entry_point, {"group": point.group, **names}, "load")
        self._note(point, problems)
        if point.group == COMPILER_GROUP and not problems:
            self._check_compiler(point, names)
        elif point.group == RUNTIME_GROUP and not problems:
            self._check_runtime(point, names)
        elif point.group == _REFERENCES and not problems:
            self._check_reference(point, names)

    def _check_reference(self, point: RegisteredPoint, names: Mapping[str, str]) -> None:
        folder, models = self._write_models(point)
        arguments = {**names, "models": models, "folder": str(folder)}
        found: Any = self._call(references.check_reference, arguments, "reference")
        if isinstance(found, list):  # the process died or hung
            self._note(point, found)
            return
        self._note(point, found["findings"])
        self._skip_models(point, found["refused"])

    def _write_models(self, point: RegisteredPoint) -> tuple[Path, list[str]]:
        """Write the small models to a new directory. Return the directory and the files."""
        folder = self.folder / f"{point.group}-{point.name}"
        folder.mkdir()
        return folder, [str(model.write(folder)) for model in SMALL_MODELS]

    def _skip_models(self, point: RegisteredPoint, refused: Mapping[str, str]) -> None:
        for model, why in refused.items():
            self.skipped.append(SkippedCheck(entry_point=point.text, what=f"model {model}", why=why))

    def _check_compiler(self, point: RegisteredPoint, names: Mapping[str, str]) -> None:
        folder, models = self._write_models(point)
        arguments = {**names, "models": models, "unsupported": str(write_unsupported(folder)), "folder": str(folder)}
        found: Any = self._call(compilers.check_compiler, arguments, "compile")
        if isinstance(found, list):  # the process died or hung
            self._note(point, found)
            return
        self._note(point, found["findings"])
        self.programs[point.name] = found["programs"]
        for what, why in found["skipped"].items():
            self.skipped.append(SkippedCheck(entry_point=point.text, what=f"rule {what}", why=why))
        self._skip_models(point, found["refused"])

    def _check_runtime(self, point: RegisteredPoint, names: Mapping[str, str]) -> None:
        imported = {"value": point.value, "package": self.package.name}
        self._note(point, self._call(board_imports.check_board_import, imported, "board-import"))
        described: Any = self._call(runtimes.describe_runtime, names, "describe")
        if isinstance(described, list):  # the process died or hung
            self._note(point, described)
            return
        self._note(point, described["findings"])
        programs = self.programs.get(point.name, [])
        if any(rule == "methods" for rule, _ in described["findings"]):
            return
        if not programs:
            why = "the package has no compiler for this runtime, or the compiler made no program"
            self.skipped.append(SkippedCheck(entry_point=point.text, what="programs", why=why))
            return
        broken: set[str] = set()
        for program in programs:
            problems = self._call(runtimes.check_program, {**names, "program": program}, "run")
            self._note(point, problems)
            broken.update(rule for rule, _ in problems)
            if broken & {"crash", "timeout"}:
                break  # the other programs are likely to end in the same way
        first = {**names, "program": programs[0]}
        # A program that does not run would fail in each of these checks.
        if not broken & _NOT_RUNNING:
            self._note(point, self._call(runtimes.check_leaks, first, "leak"))
            self._note(point, self._call(runtimes.check_profile, first, "profile"))
        for arithmetic in () if broken else described["arithmetics"]:
            given = {**first, "arithmetic": arithmetic}
            self._note(point, self._call(runtimes.check_program, given, "arithmetic"))
        self._note(point, self._call(runtimes.check_damage, first, "load-error"))
        self._note(point, self._call(runtimes.check_misuse, first, "load-error"))

    def _call(self, check: Any, arguments: Mapping[str, Any], rule: str) -> Any:
        """Call a check in a worker. Return the check's result, or the violation if the worker died, hung or failed."""
        self.checks += 1
        log = self.folder / "log"
        try:
            return self.isolated.call(check, arguments, timeout=self.timeout_s, log=log)
        except IsolatedTimeout as error:
            return [["timeout", f"{_describe(check, arguments)} {error.message}"]]
        except IsolatedCrash as error:
            return [["crash", f"{_describe(check, arguments)}: {error.message}"]]
        except (IsolatedError, HilError) as error:
            return [[rule, f"{_describe(check, arguments)}: {error.message}"]]

    def _note(self, point: RegisteredPoint, findings: Sequence[Sequence[str]]) -> None:
        for rule, found in findings:
            expected = RULES[rule]
            self.violations.append(
                PluginViolation(
                    entry_point=point.text,
                    rule=rule,
                    found=found,
                    expected=expected.expected,
                    documentation=expected.documentation,
                )
            )


def _describe(check: Any, arguments: Mapping[str, Any]) -> str:
    """Return what a check does: ``check program of model int8``."""
    model = arguments.get("program", {}).get("model", "")
    return str(check.__name__).replace("_", " ") + (f" (model {model})" if model else "")
