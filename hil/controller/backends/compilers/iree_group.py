"""Compile many small models together, because starting the compiler takes longer than compiling small models.

The models become functions of a few programs. Each model has its own cache entry; the entries of a group share one
file. :func:`compile_iree` finds these entries only through the same :class:`Cache` object. If the compilation fails
because of one model, hil removes it from the group and compiles it separately. So the result for a model never depends
on other models.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.backends.compilers.arithmetic import split_flags
from hil.controller.backends.compilers.iree_program import (
    FUNCTION,
    MAIN,
    CompileSettings,
    check_target,
    choose_settings,
    fail,
    own_declaration,
    run_compiler,
)
from hil.controller.models.compiling import LOG, Work, call_isolated
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, IsolatedCrash, IsolatedError
from hil.core import scratch
from hil.core.files import copy_file
from hil.core.futures import iterate_completed
from hil.core.narrow_integers import is_narrowed
from hil.core.results import Model
from hil.core.scratch import make_temporary_folder
from hil.errors import CompileCrashed, CompileFailed, HilError, StorageError

# Maximum size of a model: compiling a larger model takes longer than starting the compiler.
_MODEL_BYTES = 1 << 20
# Maximum group size, because a board loads the group's complete file for each function.
_GROUP_BYTES = 4 << 20
_GROUP_MODELS = 16
# Time limit of a group, which a hanging model may use up. A separate compilation has the full time limit.
_TIMEOUT_SECONDS = 300.0
# Names that need no quotes and that boards do not mistake for IREE-internal names.
_PLAIN = re.compile(r"(?!__)[A-Za-z_]\w*")


@dataclass(frozen=True)
class Together:
    """Result of compiling models together."""

    compiled: tuple[Model, ...] = ()  # compiled now and stored in the cache
    cached: tuple[Model, ...] = ()  # already in the cache
    # Left for :func:`compile_iree`: large models, rejected models, or too few models for a group.
    alone: tuple[Model, ...] = ()
    programs: int = 0


@dataclass(frozen=True)
class _Member:
    model: Model
    recipe: CompileSettings
    function: str

    def order(self) -> dict[str, Any]:
        """Return the arguments for the isolated process."""
        return {
            "model": str(self.model.path.absolute()),
            "dims": dict(self.model.dims),
            "function": self.function,
            "declaration": own_declaration(self.model, self.function, self.recipe.flags),
        }


def has_compiled(model: Model, *, flags: Sequence[str], cache: Cache) -> bool:
    """Return True if the cache has the model's program for :func:`compile_iree`, separately or in a group."""
    if split_flags(flags)[0]:
        return False
    recipe = choose_settings(model, flags)
    if cache.get(recipe.key):
        return True
    if cache.get(recipe.shared_key):
        cache.shared[recipe.key] = recipe.shared_key
        return True
    return False


def compile_together(
    models: Sequence[Model],
    *,
    flags: Sequence[str],
    cache: Cache,
    isolated: Isolated,
    recompute: bool = False,
    timeout: float | None,
    log_folder: Path,
) -> Together:
    """Compile small models so that :func:`compile_iree` finds each of them in the same cache object.

    Models with errors, or with invalid flags, are not compiled here. compile_iree reports these errors later.

    Args:
        models: Any models. Only one of multiple models with the same content is compiled.
        isolated: The pool that runs the compiler. It compiles as many groups at once as it has workers.
        timeout: Seconds for compiling one model, or None.
        log_folder: Directory for the compiler's output, one file per group.

    Raises:
        UsageError: the compiler is not installed.
        StorageError: the programs cannot be stored.
        KeyboardInterrupt: Ctrl-C. Running compilations are stopped and the pool is closed.
    """
    if split_flags(flags)[0]:
        # compile_iree rewrites each model for the arithmetic, so a program of the unchanged model would not be used.
        return Together(alone=tuple(models))
    cached: list[Model] = []
    alone: list[Model] = []
    members: dict[str, _Member] = {}
    for number, model in enumerate(models):
        recipe = choose_settings(model, flags)
        if recipe.key in members:
            continue
        if not recompute and has_compiled(model, flags=flags, cache=cache):
            cached.append(model)
        elif _may_join(model):
            members[recipe.key] = _Member(model, recipe, f"{model.function}.{number}")
        else:
            alone.append(model)
    by_flags: dict[tuple[str, ...], list[_Member]] = {}
    for member in members.values():
        by_flags.setdefault(member.recipe.flags, []).append(member)
    groups = [group for same in by_flags.values() for group in _split_groups(same, isolated.workers)]
    work: Work = {
        "cache": cache,
        "isolated": isolated,
        "recompute": recompute,
        "timeout": min(timeout or _TIMEOUT_SECONDS, _TIMEOUT_SECONDS),
        "log": log_folder,
    }
    programs: list[list[_Member]] = []
    with concurrent.futures.ThreadPoolExecutor(isolated.workers, thread_name_prefix="group") as pool:
        futures = [
            pool.submit(_compile, group, {**work, "log": log_folder / f"group-{number}.log"})
            for number, group in enumerate(groups, 1)
        ]
        try:
            for future in iterate_completed(futures):
                programs += future.result()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if not isinstance(error, HilError):
                isolated.close()
            if isinstance(error, StorageError) or not isinstance(error, HilError):
                raise
    done = [member.recipe.key for program in programs for member in program]
    alone += [member.model for key, member in members.items() if key not in done]
    return Together(tuple(members[key].model for key in done), tuple(cached), tuple(alone), len(programs))


def _may_join(model: Model) -> bool:
    if model.format != "onnx" or len(model.files) > 1 or not _PLAIN.fullmatch(model.function):
        return False
    with contextlib.suppress(CompileFailed):
        own_declaration(model, model.function, ())
        return model.path.stat().st_size <= _MODEL_BYTES
    return False


def _split_groups(members: Sequence[_Member], workers: int) -> list[list[_Member]]:
    """Split models into groups of similar size.

    There are at most as many groups as workers, unless the groups would be too large. Returns an empty list if there
    are no more models than workers.
    """
    if len(members) <= workers:
        return []
    sizes = [member.model.path.stat().st_size for member in members]
    needed = max(-(-len(members) // _GROUP_MODELS), -(-sum(sizes) // _GROUP_BYTES))
    count = max(needed, min(workers, len(members) // 2))
    by_size = [member for _, member in sorted(zip(sizes, members, strict=True), key=lambda pair: -pair[0])]
    return [by_size[first::count] for first in range(count)]


def _compile(group: Sequence[_Member], work: Work) -> list[list[_Member]]:
    """Compile a group and store the programs. Return the members of each program."""
    by_name = {member.function: member for member in group}
    open_groups = [list(group)]
    stored = []
    while open_groups:
        members = open_groups.pop()
        if len(members) < 2:
            continue
        with _make_scratch(work["cache"]) as folder:
            args = {
                "members": [member.order() for member in members],
                "flags": list(members[0].recipe.flags),
                "folder": str(folder.absolute()),
                "log": str(work["log"].absolute()),
            }
            try:
                programs = call_isolated(build_group, args, work)
            except IsolatedCrash:  # the import crashed; iree-compile runs in a separate process
                open_groups += [members[::2], members[1::2]]
                continue
            except IsolatedError:
                continue
            for program in programs:
                inside = [by_name[function] for function in program["functions"]]
                _store(folder / program["file"], inside, program["said"], work)
                stored.append(inside)
    return stored


def _store(program: Path, members: Sequence[_Member], printed: str, work: Work) -> None:
    names = ", ".join(f"{member.model.name} as {member.function}" for member in members)

    def make(folder: Path) -> None:
        try:
            os.link(program, folder / MAIN)
        except OSError:  # a different file system, or a file system without hard links
            copy_file(program, folder / MAIN)
        (folder / LOG).write_text(f"compiled together by one iree-compile: {names}\n{printed}")

    for member in members:
        meta = {**member.recipe.meta, FUNCTION: member.function}
        work["cache"].get_or_make(member.recipe.shared_key, meta, make, work["recompute"])
        work["cache"].shared[member.recipe.key] = member.recipe.shared_key


@contextlib.contextmanager
def _make_scratch(cache: Cache) -> Iterator[Path]:
    """Create a temporary directory from which files can be hard-linked into the cache.

    If the cache is not writable, use another directory. Storing the programs reports the error later.
    """
    try:
        place = cache.making()
    except StorageError:
        place = scratch.place()
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


# The location of an error in iree-compile's output: `error: loc("net.3/fc1"): ...`. A fused location contains a list.
_PLACE = re.compile(r'"(?:graph:)?(?P<function>[\w.]+)(?:/|")')


def build_group(
    members: Sequence[Mapping[str, Any]], flags: Sequence[str], folder: str, log: str
) -> list[dict[str, Any]]:
    """Compile ONNX models together, except models that fail.

    Args:
        members: For each model, ``model`` (its file), ``dims`` (sizes of symbolic dimensions), ``function`` (its unique
            name in the program) and ``declaration`` (the function's declaration, or None).

    Returns:
        The programs, usually one. Each has ``file`` (the file name in the directory), ``functions``, and ``said`` (the
        compiler's output). A member is missing if it failed to import, if every program with it failed to compile, or
        if it was the only remaining member.
    """
    from iree.compiler import ir

    from hil.controller.backends.compilers.onnx_to_mlir import add_to

    module = ir.Module.create(ir.Location.unknown(ir.Context()))
    taken: list[str] = []
    for member in members:
        try:
            names = member["function"], member["declaration"]
            add_to(module, Path(member["model"]), member["dims"], *names, narrow=is_narrowed(flags))
        except Exception as error:  # compiling the model separately reports the error
            print(f"note: skipped {member['function']}: {type(error).__name__}: {error}", flush=True)
        else:
            taken.append(member["function"])
    programs: list[dict[str, Any]] = []
    open_sets = [taken]
    with make_temporary_folder("hil-compile-") as scratch:
        while open_sets:
            functions = open_sets.pop()
            if len(functions) < 2:
                continue
            source = Path(scratch) / "group.mlirbc"
            _write(module, functions, source)
            out = Path(folder) / f"{len(programs)}.vmfb"
            # Groups are compiled in parallel, so a group uses one core.
            code, printed = run_compiler(source, out, [*flags, "--mlir-disable-threading"], Path(scratch), Path(log))
            check_target(printed)
            if not code:
                programs.append({"file": out.name, "functions": functions, "said": printed})
                continue
            # Split the group only after errors of a model. Other errors would affect all parts.
            with contextlib.suppress(CompileFailed, CompileCrashed):
                fail(code, printed)
            if named := _find_named(printed) & set(functions):
                open_sets.append([function for function in functions if function not in named])
            else:
                open_sets += [functions[::2], functions[1::2]]
    return programs


def _write(module: Any, functions: Sequence[str], out: Path) -> None:
    """Write a module with the functions of some members, and with the private functions that they call."""
    from iree.compiler import ir

    part = module.operation.clone()
    for operation in list(part.regions[0].blocks[0].operations):
        name = ir.StringAttr(operation.attributes["sym_name"]).value
        if ".".join(name.split(".")[:2]) not in functions:
            operation.erase()
    with out.open("wb") as file:
        part.write_bytecode(file)


def _find_named(printed: str) -> set[str]:
    """Return the functions that the compiler's errors name."""
    errors = (line.split("error: ", 1)[1] for line in printed.splitlines() if "error: loc(" in line)
    places = (text.split("): ", 1)[0] for text in errors)
    return {match["function"] for place in places for match in _PLACE.finditer(place)}
