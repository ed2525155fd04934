"""TensorFlow's ahead-of-time compiler: functions of a model, training steps included, into libraries for any board.

Three steps, each in processes of their own and each cached by all it depends on: the graph and its config are
generated, tfcompile makes a header and objects of them, and these are linked with XLA's small runtime.
"""

from __future__ import annotations

import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.backends.compilers import tfcompile_build, tfcompile_graph
from hil.controller.backends.compilers.tfcompile_build import HEADER
from hil.controller.backends.targets import Target as BoardTarget
from hil.controller.models.compiling import Work, call_isolated, compiling, making_debug_folder
from hil.controller.models.tensorflow.graphs import new_value
from hil.controller.models.tensorflow.hlo import HLO
from hil.controller.storage.cache import Cache, digests_in
from hil.controller.storage.packages import needed_version
from hil.core.digest import digest_file
from hil.core.installed import version
from hil.core.results import Artifact, Model
from hil.core.tensors import Array
from hil.errors import CompileCrashed, CompileFailed, UsageError
from hil.formats.xla_program import LIBRARY, VALUES, Argument, Signature, write_signature

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hil.controller.models.compiling import CompileOrder

RUNTIME = "xla-aot"
FORMATS = ("tf", "keras")
GENERATE, COMPILE, LINK = "generate config", "compile", "link"
EXTRA = "tfcompile"
# Raise this when what a step makes changes: older ones in the cache are then not used.
_VERSION = 3


def compile_tfcompile(model: Model, **order: Unpack[CompileOrder]) -> Artifact:
    """Compile a SavedModel's or a Keras model's function to a shared library.

    Flags: ``--target-triple=`` and ``--target-cpu=`` (this machine's family by default), ``--cpp-class=``, the name of
    the class in the header, and ``--variables=outside``, with which variables are inputs, given the model's own values
    unless told otherwise; by default the program keeps these. The new values of those that it assigns are outputs,
    after its own.

    Other arguments and errors are those of :func:`hil.controller.backends.compilers.compile_model`.
    """
    debug_ir = order["debug_ir"]
    if model.format not in FORMATS or order["runtime"] != RUNTIME:
        raise UsageError(
            f"tfcompile makes programs for the runtime {RUNTIME} of TensorFlow's and Keras's models, not "
            f"{order['runtime']} of {model.format}"
        )
    hlo = None
    if debug_ir is not None:
        order["recompute"] = True
        hlo = debug_ir / HLO
        with making_debug_folder(hlo):
            hlo.mkdir(parents=True, exist_ok=True)
    steps = Steps(model, order["flags"], order, hlo, hlo_passes=order.get("debug_ir_passes", False))
    graph = steps.generate()
    program = steps.compile(graph)
    library = steps.link(graph, program)
    if debug_ir is not None:
        with making_debug_folder(debug_ir):
            for folder in (graph, program):
                shutil.copytree(folder, debug_ir, dirs_exist_ok=True)
    return steps.artifact(graph, library)


def compiler() -> str:
    """Name and version of all that makes programs. Raises UsageError: a part is not installed."""
    return f"tfcompile {needed_version('tensorflow', EXTRA)}, zig {needed_version('ziglang', EXTRA)}"


class Steps:
    """The steps by which a program is made of a model, each of which gives the folder of what it makes.

    Args:
        hlo: a folder for XLA's modules before and after it optimised them, as text and as graphs; or None.
        hlo_passes: whether those after every pass go there as well.

    Raises:
        UsageError: a flag is none of ours, the target is unknown, or a part of the compiler is not installed. Each step
            raises CompileFailed, CompileCrashed, StageTimeout: with its name in the message.
    """

    def __init__(
        self, model: Model, flags: Sequence[str], work: Work, hlo: Path | None = None, *, hlo_passes: bool = False
    ) -> None:
        self._hlo = {"hlo": str(hlo.absolute()) if hlo is not None else "", "hlo_passes": hlo_passes}
        self._target = target_of(flags)
        self.compiler = compiler()
        self.seconds: dict[str, float] = {}  # step -> how long it took, where it was not in the cache
        self._model = model
        self._flags = tuple(flags)
        self._work = work
        self._log = str(work["log"].absolute())
        work["log"].parent.mkdir(parents=True, exist_ok=True)
        work["log"].touch()

    def generate(self) -> Path:
        """The graph, its config and the variables' values."""
        what = {"function": self._model.function, "dims": dict(self._model.dims)}

        def make(folder: Path) -> None:
            path = str(self._model.path.absolute())
            call_isolated(tfcompile_graph.generate, {**what, "path": path, "folder": str(folder)}, self._work)

        return self._made(GENERATE, make, "tfcompile-graph", model=self._model.digest, **what)

    def compile(self, graph: Path) -> Path:
        """The header and the objects that tfcompile makes of a generated graph."""
        what = {"triple": self._target.triple, "cpu": self._target.cpu, "cpp_class": self._target.cpp_class}

        def make(folder: Path) -> None:
            arguments = {**what, **self._hlo, "source": str(graph), "folder": str(folder), "log": self._log}
            call_isolated(tfcompile_build.compile_graph, arguments, self._work)

        return self._made(COMPILE, make, "tfcompile-program", graph=digests_in(graph), **what)

    def link(self, graph: Path, program: Path) -> Path:
        """The library that is linked of a program and XLA's runtime."""
        target = self._target
        signature = write_signature(signature_of(self._model.function, graph))
        what = {"signature": signature, "target": target.zig, "cpp_class": target.cpp_class}

        def make(folder: Path) -> None:
            sources = tfcompile_build.needed_sources((program / HEADER).read_text())
            with ThreadPoolExecutor(self._work["isolated"].workers) as pool:
                objects = [str(one) for one in pool.map(self._object, sources)]
            made = {"program": str(program), "objects": objects, "library": str(folder / LIBRARY), "log": self._log}
            call_isolated(tfcompile_build.link, {**what, **made}, self._work)

        return self._made(LINK, make, "tfcompile-library", program=digests_in(program), zig=version("ziglang"), **what)

    def artifact(self, graph: Path, library: Path) -> Artifact:
        """The program as a board gets it: the library and, unless they are arguments, the variables' values."""
        files, digests = {LIBRARY: library / LIBRARY}, {LIBRARY: digests_in(library)[LIBRARY]}
        signature = signature_of(self._model.function, graph)
        carried: Mapping[str, Array] = {}
        if self._target.variables:
            values = signature.values((graph / VALUES).read_bytes())
            carried = {new_value(name): value for name, value in values.items()}
        elif signature.variables:
            files[VALUES], digests[VALUES] = graph / VALUES, digests_in(graph)[VALUES]
        return Artifact(
            runtime=RUNTIME,
            main=LIBRARY,
            files=files,
            digests=digests,
            function=self._model.function,
            compiler=self.compiler,
            flags=self._flags,
            inputs=signature.inputs(variables=self._target.variables),
            outputs=signature.results(),
            cached=not self.seconds,
            seconds=sum(self.seconds.values()),
            log=self._work["log"],
            carried=carried,
        )

    def _made(self, step: str, make: Callable[[Path], None], kind: str, **parts: Any) -> Path:
        def fill(folder: Path) -> None:
            begin = time.monotonic()
            with compiling(f"{step}:", died=step, failed=step):
                try:
                    make(folder)
                except (CompileFailed, CompileCrashed) as error:
                    error.args = (f"{step}: {error.message}",)
                    raise
            self.seconds[step] = time.monotonic() - begin

        key, meta = _key(kind, **parts), {"model": self._model.name, "step": step}
        return self._work["cache"].get_or_make(key, meta, fill, self._work["recompute"])[0]

    def _object(self, source: Path) -> Path:
        """A source of XLA's runtime, compiled."""
        target = self._target.zig

        def make(folder: Path) -> None:
            arguments = {"source": str(source), "target": target, "folder": str(folder), "log": self._log}
            call_isolated(tfcompile_build.compile_source, arguments, self._work)

        key = _key(
            "tfcompile-runtime", source=source.name, digest=digest_file(source), target=target, zig=version("ziglang")
        )
        # Not asked to recompute: the model has no part in it.
        meta = {"model": f"XLA's runtime: {source.name}", "for": target}
        return self._work["cache"].get_or_make(key, meta, make)[0] / "object.o"


def _key(kind: str, **parts: Any) -> str:
    return Cache.key(kind, tensorflow=needed_version("tensorflow", EXTRA), version=_VERSION, **parts)


def signature_of(function: str, graph: Path) -> Signature:
    """What the library of a generated graph says of itself."""
    ports = tfcompile_graph.read_ports(graph)
    variables = (Argument(port.spec, True, not port.read_only) for port in ports.variables)
    return Signature(
        function,
        (*(Argument(port.spec) for port in ports.feeds), *variables),
        tuple(port.spec for port in ports.fetches),
    )


_TRIPLE, _CPU, _VARIABLES, _CLASS = "--target-triple", "--target-cpu", "--variables", "--cpp-class"
_FLAGS = (_TRIPLE, _CPU, _VARIABLES, _CLASS)
# A class in namespaces: what tfcompile can make of it, but for reserved words, which it refuses itself.
_CPP_CLASS = re.compile(r"(?:::)?(?:[A-Za-z_]\w*::)*[A-Za-z_]\w*", re.ASCII)
# Family of CPUs -> (tfcompile's target, Zig's). Old C libraries, which newer ones still are.
_TARGETS = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86_64-linux-gnu.2.17"),
    "aarch64": ("aarch64-unknown-linux-gnu", "aarch64-linux-gnu.2.17"),
}
_FAMILY = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Target:
    """What to compile for."""

    triple: str  # as LLVM calls it
    cpu: str  # as LLVM calls it; "" is any of its family
    zig: str  # as Zig calls it, with the C library
    cpp_class: str  # of the program in its header, with namespaces
    variables: bool  # whether the program's variables are arguments and results like others, and not kept with it


def target_of(flags: Sequence[str]) -> Target:
    """What the flags ask for. Raises UsageError: a flag is none of ours, or the target is unknown."""
    # tfcompile itself writes --target_triple.
    parted = (flag.partition("=") for flag in flags)
    given = {name.replace("_", "-"): value for name, _, value in parted}
    if unknown := sorted(set(given) - set(_FLAGS)):
        hint = (
            "name the graph as MODEL, and its config with --function" if unknown[0] in ("--graph", "--config") else ""
        )
        raise UsageError(
            f"tfcompile has no flag {unknown[0]}", hint=hint or f"it has {', '.join(f'{flag}=' for flag in _FLAGS)}"
        )
    cpp_class = given.get(_CLASS) or tfcompile_build.CLASS
    if not _CPP_CLASS.fullmatch(cpp_class):
        raise UsageError(f"{_CLASS}={cpp_class} names no class of C++", hint=f"{_CLASS}=mynamespace::MyComputation")
    variables = given.get(_VARIABLES, "inside")
    if variables not in ("inside", "outside"):
        raise UsageError(f"{_VARIABLES} is 'inside' or 'outside', not {variables!r}")
    machine = platform.machine().lower()
    triple = given.get(_TRIPLE) or _TARGETS.get(_FAMILY.get(machine, machine), ("",))[0]
    family = triple.split("-")[0]
    if _FAMILY.get(family, family) not in _TARGETS or "linux" not in triple:
        raise UsageError(
            f"tfcompile's programs cannot be linked for {triple or machine}",
            hint=f"{_TRIPLE} with one of: {', '.join(known for known, _ in _TARGETS.values())}",
        )
    zig = _TARGETS[_FAMILY.get(family, family)][1]
    return Target(triple, given.get(_CPU, ""), zig, cpp_class, variables == "outside")


def tfcompile_target(machine: Mapping[str, Any]) -> BoardTarget:
    """What to compile for on a machine as a board shows it (``arch``); compiling refuses one that has no programs."""
    arch = str(machine.get("arch", "")).lower()
    triple = f"{_FAMILY.get(arch, arch)}-unknown-linux-gnu"
    return BoardTarget((f"{_TRIPLE}={triple}",), triple) if arch else BoardTarget((), "")
