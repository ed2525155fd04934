"""Run all checks of a package, each in a worker process with a time limit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.controller.records.commands.plugins import PluginReport, PluginViolation, SkippedCheck
from hil.controller.storage.isolation.isolated import Isolated, IsolatedCrash, IsolatedError, IsolatedTimeout
from hil.controller.workloads.plugin_check import board_imports, compilers, entry_points, references, runtimes
from hil.controller.workloads.plugin_check.packages import CheckedPackage, RegisteredPoint
from hil.controller.workloads.plugin_check.rules import RULES
from hil.controller.workloads.plugin_check.small_models import SMALL_MODELS, write_unsupported
from hil.core.runtimes import COMPILER_GROUP, RUNTIME_GROUP, TARGET_GROUP
from hil.core.text import TextSink
from hil.errors import EXIT_FAIL, EXIT_OK, HilError, did_you_mean

_BOARD_CONFIGS, _REFERENCES = "hil.board_configs", "hil.references"
# Groups whose objects hil calls here. In the other groups, hil checks only types and arguments.
_CALLED = {COMPILER_GROUP, RUNTIME_GROUP, TARGET_GROUP, _REFERENCES, _BOARD_CONFIGS}
_FAILED = "the entry point violates other rules"
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
        operators=sorted(suite.operators),
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
    # Operators of the models that a compiler compiled or a reference computed.
    operators: set[str] = field(default_factory=set)
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
        if point.group not in _CALLED:
            self._skip(point, "calls", "hil checks only the type and the arguments")
        elif problems:
            self._skip(point, "other rules", _FAILED)
        elif point.group == COMPILER_GROUP:
            self._check_compiler(point, names)
        elif point.group == RUNTIME_GROUP:
            self._check_runtime(point, names)
        elif point.group == _REFERENCES:
            self._check_reference(point, names)

    def _check_reference(self, point: RegisteredPoint, names: Mapping[str, str]) -> None:
        folder, models = self._write_models(point)
        arguments = {**names, "models": models, "folder": str(folder)}
        found = self._describe_point(point, references.check_reference, arguments, "reference")
        if found is None:
            return
        self._skip_models(point, found["refused"])
        self._add_operators(found["computed"])

    def _write_models(self, point: RegisteredPoint) -> tuple[Path, list[str]]:
        """Write the small models to a new directory. Return the directory and the files."""
        folder = self.folder / f"{point.group}-{point.name}"
        folder.mkdir()
        return folder, [str(model.write(folder)) for model in SMALL_MODELS]

    def _skip_models(self, point: RegisteredPoint, refused: Mapping[str, str]) -> None:
        for model, why in refused.items():
            self._skip(point, f"model {model}", why)

    def _skip(self, point: RegisteredPoint, what: str, why: str) -> None:
        self.skipped.append(SkippedCheck(entry_point=point.text, what=what, why=why))

    def _add_operators(self, models: Collection[str]) -> None:
        for model in SMALL_MODELS:
            if model.name in models:
                self.operators |= model.operators

    def _check_compiler(self, point: RegisteredPoint, names: Mapping[str, str]) -> None:
        folder, models = self._write_models(point)
        arguments = {**names, "models": models, "unsupported": str(write_unsupported(folder)), "folder": str(folder)}
        found = self._describe_point(point, compilers.check_compiler, arguments, "compile")
        if found is None:
            return
        self.programs[point.name] = found["programs"]
        for what, why in found["skipped"].items():
            self._skip(point, f"rule {what}", why)
        self._add_operators([program["model"] for program in found["programs"]])
        self._skip_models(point, found["refused"])

    def _check_runtime(self, point: RegisteredPoint, names: Mapping[str, str]) -> None:
        imported = {"value": point.value, "package": self.package.name}
        self._note(point, self._call(board_imports.check_board_import, imported, "board-import"))
        described = self._describe_point(point, runtimes.describe_runtime, names, "describe")
        if described is None:
            return
        programs = self.programs.get(point.name, [])
        if any(rule == "methods" for rule, _ in described["findings"]):
            self._skip(point, "programs", _FAILED)
            return
        if not programs:
            why = "the package has no compiler for this runtime, or the compiler made no program"
            self._skip(point, "programs", why)
            return
        broken: set[str] = set()
        for program in programs:
            # The other programs are likely to end in the same way.
            if broken & {"crash", "timeout"}:
                self._skip(point, f"program of model {program['model']}", "an earlier program crashed or hung")
                continue
            problems = self._call(runtimes.check_program, {**names, "program": program}, "run")
            self._note(point, problems)
            broken.update(rule for rule, _ in problems)
        first = {**names, "program": programs[0]}
        # A program that does not run would fail in each of these checks.
        if broken & _NOT_RUNNING:
            self._skip(point, "rules leak, profile", "a program does not run")
        else:
            if runtimes.can_count_files():
                self._note(point, self._call(runtimes.check_leaks, first, "leak"))
            else:
                self._skip(point, "rule leak", "this system has no /proc")
            self._note(point, self._call(runtimes.check_profile, first, "profile"))
        if broken and described["arithmetics"]:
            self._skip(point, "rule arithmetic", "a program violates other rules")
        for arithmetic in () if broken else described["arithmetics"]:
            given = {**first, "arithmetic": arithmetic}
            self._note(point, self._call(runtimes.check_program, given, "arithmetic"))
        self._note(point, self._call(runtimes.check_damage, first, "load-error"))
        self._note(point, self._call(runtimes.check_misuse, first, "load-error"))

    def _describe_point(
        self, point: RegisteredPoint, check: Any, arguments: Mapping[str, Any], rule: str
    ) -> dict[str, Any] | None:
        """Call a check that returns findings and facts, and note the findings. Return None if the check failed."""
        found: Any = self._call(check, arguments, rule)
        if isinstance(found, list):  # the process died or hung
            self._note(point, found)
            self._skip(point, "other rules", _FAILED)
            return None
        self._note(point, found["findings"])
        return dict(found)

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
