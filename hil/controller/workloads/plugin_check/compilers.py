"""Checks of a compiler. The functions run in a worker process."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from hil.controller.backends.compilers import check_artifact
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, IsolatedError, IsolatedFailure
from hil.controller.workloads.plugin_check.entry_points import find_point, list_flags
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
# Errors of Python that show a mistake in the compiler. A compiler may raise CompileFailed for the other errors.
_MISTAKES = (TypeError, NameError)
# The same for code in a process of `isolated.call`, by name.
_ISOLATED_MISTAKES = frozenset(
    "AssertionError AttributeError IndexError KeyError NameError TypeError UnboundLocalError ZeroDivisionError".split()
)


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
        ``findings``; ``programs``: a program for every compiled model; ``refused``: model -> error; ``skipped``:
        check -> reason.
    """
    found: list[ContractFinding] = []
    programs, refused = [], {}
    keys: dict[str, frozenset[str]] = {}
    shared: list[str] = []  # pairs of models with the same key
    flags, *other_flags = list_flags(name, package)
    with Isolated(1) as isolated:
        compiler = _CheckedCompiler(name, package, flags, Path(folder), isolated)
        for path in map(Path, models):
            model = import_model(path, isolated=isolated)
            try:
                artifact = compiler.compile(model)
            except _REFUSALS as error:
                refused[path.stem] = error.message
                found += _check_refusal_cause(f"model {path.stem}", error)
                continue
            except BaseException as error:
                found.append(ContractFinding("compile-error", f"model {path.stem}: {format_call_error(error)}"))
                continue
            # A result for another model would violate further rules.
            if same := find_same_key(compiler.keys, keys):
                shared.append(f"{same} and {path.stem}")
                continue
            keys[path.stem] = compiler.keys
            wrong = list_artifact_errors(artifact, model, flags)
            found += [ContractFinding("artifact", f"model {path.stem}: {text}") for text in wrong]
            if not wrong:
                programs.append(_describe_program(path, artifact))
                if len(programs) == 1:
                    found += compiler.check_cache(model, artifact)
                    found += compiler.check_flags(model, artifact, other_flags)
        found += [ContractFinding("cache-key", f"the models {pair} have the same key") for pair in shared]
        if not programs and not found:
            found.append(ContractFinding("compile", "; ".join(f"{model}: {why}" for model, why in refused.items())))
        if shared:
            compiler.skipped["compile-error"] = "models have the same cache key"
        else:
            found += compiler.check_refusal(import_model(Path(unsupported), isolated=isolated))
    return {
        "findings": [one.to_json() for one in found],
        "programs": programs,
        "refused": refused,
        "skipped": compiler.skipped,
    }


def find_same_key(keys: Set[str], others: Mapping[str, Set[str]]) -> str:
    """Return the model whose keys contain all of these keys, or "". A cached program needs only one of its keys."""
    return next((model for model, known in others.items() if keys and keys <= known), "")


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
        self.skipped: dict[str, str] = {}
        self._name = name
        self._function = find_point(COMPILER_GROUP, name, package).load()
        self._flags = tuple(flags)
        self._isolated = isolated
        self._log = folder / "compile.log"
        self._log.touch()
        self._cache = _RecordedCache(folder / "cache")
        self._other_caches = folder / "other-caches"
        # Keys for a program that is in the cache.
        self._cached_keys: frozenset[str] = frozenset()

    @property
    def keys(self) -> frozenset[str]:
        """Keys that the last compilation with the target's flags requested."""
        return frozenset(self._cache.keys)

    def compile(self, model: Model, *, recompute: bool = False) -> Artifact:
        """Compile a model with the target's flags."""
        self._cache.keys.clear()
        return self._call(model, self._flags, self._cache, recompute=recompute)

    def _call(self, model: Model, flags: Sequence[str], cache: Cache, *, recompute: bool = False) -> Artifact:
        order: dict[str, Any] = {"runtime": self._name, "flags": tuple(flags), "recompute": recompute}
        order |= {"cache": cache, "isolated": self._isolated, "timeout": _CALL_SECONDS, "log": self._log}
        made: Artifact = self._function(model, debug_ir=None, debug_ir_passes=False, failure=None, **order)
        return made

    def check_cache(self, model: Model, first: Artifact) -> list[ContractFinding]:
        """Compile again with the same flags, also without the cache."""
        found = [] if _COMPILER.fullmatch(first.compiler) else [ContractFinding("compiler-name", repr(first.compiler))]
        try:
            again = self.compile(model)
            self._cached_keys = self.keys
            if not self.keys:
                return [*found, ContractFinding("cache", "the compiler does not use the argument cache")]
            if not again.cached or dict(again.digests) != dict(first.digests):
                how = "the second result has another digest" if again.cached else "the second result has cached=False"
                found.append(ContractFinding("cache", how))
            if self.compile(model, recompute=True).cached:
                found.append(ContractFinding("recompute", "the result with recompute=True has cached=True"))
        except BaseException as error:
            return [*found, ContractFinding("cache", f"the second compilation failed: {format_call_error(error)}")]
        return found

    def check_flags(self, model: Model, first: Artifact, others: Sequence[Sequence[str]]) -> list[ContractFinding]:
        """Compile with an unknown flag, and with the target's flags for other machines.

        If all of these flags are refused or give the same program, the check is skipped.
        """
        if not self._cached_keys:  # the check of the cache reports the reason
            return []
        found, differ = [], False
        for number, flags in enumerate(((*self._flags, _FLAG), *others)):
            text = f"the flag {_FLAG}" if not number else f"the flags {shlex.join(flags) or 'none'}"
            # A new cache: wrong keys must not replace or return the program of the target's flags.
            cache = _RecordedCache(self._other_caches / str(number))
            try:
                made = self._call(model, flags, cache)
            except _REFUSALS as error:
                found += _check_refusal_cause(f"with {text}", error)
                continue
            except BaseException as error:
                found.append(ContractFinding("compile-error", f"with {text}: {format_call_error(error)}"))
                continue
            # Other flags may have the meaning of the first ones: then the programs are equal.
            is_other = not number or list_digests(made) != list_digests(first)
            differ = differ or is_other
            if is_other and self._cached_keys <= set(cache.keys):
                found.append(ContractFinding("cache-key", f"with {text}, the key is the same"))
            if is_other and number:
                break  # one other setting is enough
        if not differ and not found:
            self.skipped["cache-key"] = (
                f"no second setting known: {_FLAG} is refused, and the target function chooses no flags for other "
                "machines that give another program"
            )
        return found

    def check_refusal(self, model: Model) -> list[ContractFinding]:
        """Compile a model with an unknown operator."""
        try:
            self.compile(model)
        except _REFUSALS as error:
            return _check_refusal_cause("a model with an unknown operator", error)
        except BaseException as error:
            return [
                ContractFinding("compile-error", f"a model with an unknown operator raises {format_call_error(error)}")
            ]
        return [ContractFinding("compile-error", "a model with an unknown operator compiles")]


def _check_refusal_cause(what: str, error: BaseException) -> list[ContractFinding]:
    if mistake := find_mistake(error):
        return [ContractFinding("compile-error", f"{what}: {type(error).__name__} hides an unexpected {mistake}")]
    return []


def find_mistake(error: BaseException) -> str:
    """Return the text of an error or of one of its causes if it is unexpected, else ""."""
    for cause in (error, *_iter_causes(error)):
        if isinstance(cause, IsolatedFailure):
            if cause.message.partition(":")[0] in _ISOLATED_MISTAKES:
                return cause.message
        elif isinstance(cause, _MISTAKES):
            return format_error(cause)
    return ""


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    while (cause := error.__cause__ or error.__context__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        error = cause


def format_call_error(error: BaseException) -> str:
    """Return an error's class and text. The text of an isolated call's error contains the original class."""
    return error.message if isinstance(error, IsolatedError) else format_error(error)


def list_digests(made: object) -> list[str]:
    """Return the digests of a result's files, or [] for an invalid result."""
    return sorted(made.digests.values()) if isinstance(made, Artifact) else []


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
