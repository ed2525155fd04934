"""Checks of a compiler. The functions run in a worker process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.backends.compilers import check_artifact
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, IsolatedError
from hil.controller.workloads.plugin_check.entry_points import choose_flags, find_point
from hil.controller.workloads.plugin_check.rules import ContractFinding
from hil.core.files import digest_file
from hil.core.guarded import format_error
from hil.core.results import Artifact, Model
from hil.core.runtimes import COMPILER_GROUP
from hil.core.tensors import TensorSpec
from hil.errors import CompileFailed, HilError, NotRun, UsageError

_REFUSALS = (CompileFailed, NotRun, UsageError)
# A flag that no compiler knows. A compiler may refuse it.
_FLAG = "--hil-check-flag=1"
_COMPILER = re.compile(r"\S+ \S*\d\S*")
_CALL_SECONDS = 120.0


class _RecordedCache(Cache):
    """Cache that records the requested keys."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.keys: list[str] = []

    def get(self, key: str) -> Path | None:
        """Return an entry and record the key."""
        self.keys.append(key)
        return super().get(key)

    def put(self, key: str, meta: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
        """Create an entry and record the key."""
        self.keys.append(key)
        return super().put(key, meta, fill)


def check_compiler(name: str, package: str, models: Sequence[str], unsupported: str, folder: str) -> dict[str, Any]:
    """Compile models, and check the results, the cache and the errors.

    Args:
        models: ONNX files.
        unsupported: model with an unknown operator.
        folder: a directory for the cache and logs.

    Returns:
        ``findings``; ``programs``: a program for each compiled model; ``refused``: model -> error.
    """
    found: list[ContractFinding] = []
    programs, refused = [], {}
    flags = choose_flags(name, package)
    with Isolated(1) as isolated:
        compiler = _CheckedCompiler(name, package, flags, Path(folder), isolated)
        for path in map(Path, models):
            model = import_model(path, isolated=isolated)
            try:
                artifact = compiler.compile(model)
            except _REFUSALS as error:
                refused[path.stem] = error.message
                continue
            except BaseException as error:
                found.append(ContractFinding("compile-error", f"model {path.stem}: {format_call_error(error)}"))
                continue
            wrong = list_artifact_errors(artifact, model, flags)
            found += [ContractFinding("artifact", f"model {path.stem}: {text}") for text in wrong]
            if not wrong:
                programs.append(_describe_program(path, artifact))
                if len(programs) == 1:
                    found += compiler.check_cache(model, artifact)
        if not programs and not found:
            found.append(ContractFinding("compile", "; ".join(f"{model}: {why}" for model, why in refused.items())))
        found += compiler.check_refusal(import_model(Path(unsupported), isolated=isolated))
    return {"findings": [one.to_json() for one in found], "programs": programs, "refused": refused}


def list_artifact_errors(made: object, model: Model, flags: Sequence[str]) -> list[str]:
    """Return what is wrong with the result of a compiler."""
    try:
        check_artifact(made)
    except (TypeError, ValueError, HilError) as error:
        return [str(error)]
    assert isinstance(made, Artifact)
    wrong = [f"digest of {name} does not match the file" for name in _list_wrong_digests(made)]
    if list(made.flags) != list(flags):
        wrong.append(f"flags are {list(made.flags)}, expected {list(flags)}")
    for which, specs, expected in (("inputs", made.inputs, model.inputs), ("outputs", made.outputs, model.outputs)):
        if specs is not None and expected is not None and not are_alike(specs, expected):
            wrong.append(f"{which} are {_list_specs(specs)}, expected {_list_specs(expected)}")
    return wrong


def are_alike(specs: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> bool:
    """Return whether tensors have the same dtypes and shapes. Programs may lack the names of their models."""
    if len(specs) != len(expected):
        return False
    pairs = zip(specs, expected, strict=True)
    return all(not one.dtype or (one.dtype, one.shape) == (other.dtype, other.shape) for one, other in pairs)


class _CheckedCompiler:
    def __init__(self, name: str, package: str, flags: Sequence[str], folder: Path, isolated: Isolated) -> None:
        self._name = name
        self._function = find_point(COMPILER_GROUP, name, package).load()
        self._flags = tuple(flags)
        self._isolated = isolated
        self._log = folder / "compile.log"
        self._log.touch()
        self._cache = _RecordedCache(folder / "cache")

    def compile(self, model: Model, *more: str, recompute: bool = False) -> Artifact:
        """Compile a model with the target's flags and more flags."""
        self._cache.keys.clear()
        order: dict[str, Any] = {"runtime": self._name, "flags": (*self._flags, *more), "recompute": recompute}
        order |= {"cache": self._cache, "isolated": self._isolated, "timeout": _CALL_SECONDS, "log": self._log}
        made: Artifact = self._function(model, debug_ir=None, debug_ir_passes=False, failure=None, **order)
        return made

    def check_cache(self, model: Model, first: Artifact) -> list[ContractFinding]:
        """Compile again: with the same flags, without the cache, and with another flag."""
        found = [] if _COMPILER.fullmatch(first.compiler) else [ContractFinding("compiler-name", repr(first.compiler))]
        try:
            again = self.compile(model)
            keys = set(self._cache.keys)
            if not keys:
                return [*found, ContractFinding("cache", "the compiler does not use the argument cache")]
            if not again.cached or dict(again.digests) != dict(first.digests):
                how = "the second result has another digest" if again.cached else "the second result has cached=False"
                found.append(ContractFinding("cache", how))
            if self.compile(model, recompute=True).cached:
                found.append(ContractFinding("recompute", "the result with recompute=True has cached=True"))
        except BaseException as error:
            return [*found, ContractFinding("cache", f"the second compilation failed: {format_call_error(error)}")]
        try:
            self.compile(model, _FLAG)
        except _REFUSALS:
            return found
        except BaseException as error:
            return [*found, ContractFinding("compile-error", f"with the flag {_FLAG}: {format_call_error(error)}")]
        if keys & set(self._cache.keys):
            found.append(ContractFinding("cache-key", f"the flag {_FLAG} is accepted, and the key is the same"))
        return found

    def check_refusal(self, model: Model) -> list[ContractFinding]:
        """Compile a model with an unknown operator."""
        try:
            self.compile(model)
        except _REFUSALS:
            return []
        except BaseException as error:
            return [
                ContractFinding("compile-error", f"a model with an unknown operator raises {format_call_error(error)}")
            ]
        return [ContractFinding("compile-error", "a model with an unknown operator compiles")]


def format_call_error(error: BaseException) -> str:
    """Return an error's class and text. The text of an isolated call's error contains the original class."""
    return error.message if isinstance(error, IsolatedError) else format_error(error)


def _list_wrong_digests(made: Artifact) -> list[str]:
    return [
        name
        for name, path in made.files.items()
        if digest_file(path, made.digests[name].partition(":")[0]) != made.digests[name]
    ]


def _list_specs(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs)) or "none"


def _describe_program(path: Path, made: Artifact) -> dict[str, Any]:
    """Return a program as JSON values."""
    return json.loads(  # type: ignore[no-any-return]
        json.dumps(
            {
                "model": path.stem,
                "main": made.main,
                "function": made.function,
                "files": {name: str(file) for name, file in made.files.items()},
            }
        )
    )
