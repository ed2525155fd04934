"""Compile functions of TensorFlow models, including training steps, to libraries with tfcompile.

There are three steps: generate the graph and the config, compile them to a header and objects with tfcompile, and link
the objects with XLA's small runtime. Each step runs in isolated processes. The results are cached by all inputs of the
step.
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

from hil.controller.backends.compilers.tensorflow import tfcompile_build, tfcompile_graph
from hil.controller.backends.compilers.tensorflow.tfcompile_build import HEADER
from hil.controller.backends.targets import Target as BoardTarget
from hil.controller.models.compiling import Work, call_isolated, convert_compiler_errors, convert_debug_folder_errors
from hil.controller.models.tensorflow.graphs import name_new_value
from hil.controller.models.tensorflow.hlo import HLO
from hil.controller.storage.cache import Cache, read_digests
from hil.controller.storage.sources.packages import require_version
from hil.core.files import MAX_MODEL_BYTES, digest_file, read_file, read_text
from hil.core.installed import get_version
from hil.core.results import Artifact, Model
from hil.core.tensors import Array
from hil.errors import CompileCrashed, CompileFailed, UsageError
from hil.formats.xla_program import LIBRARY, VALUES, Argument, LibrarySignature, write_signature

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hil.controller.models.compiling import CompileOrder

RUNTIME = "xla-aot"
FORMATS = ("tf", "keras")
GENERATE, COMPILE, LINK = "generate config", "compile", "link"
EXTRA = "tfcompile"
# Increase this when the output of a step changes. Cached entries become stale.
_VERSION = 3


def compile_tfcompile(model: Model, **order: Unpack[CompileOrder]) -> Artifact:
    """Compile a function of a SavedModel or Keras model to a shared library.

    Flags: ``--target-triple=`` and ``--target-cpu=``: the target. The default is the CPU family of this machine.
        ``--cpp-class=``: the name of the class in the header. ``--variables=outside``: makes variables inputs, with the
        model's values as defaults. Otherwise, the program stores the variables.

    The new values of assigned variables are additional outputs, after the function's outputs.

    Arguments and errors: see :func:`hil.controller.backends.compilers.compile_model`.
    """
    debug_ir = order["debug_ir"]
    if model.format not in FORMATS or order["runtime"] != RUNTIME:
        raise UsageError(
            f"tfcompile requires a TensorFlow or Keras model and the runtime {RUNTIME}, got {model.format} and "
            f"{order['runtime']}"
        )
    hlo = None
    if debug_ir is not None:
        order["recompute"] = True
        hlo = debug_ir / HLO
        with convert_debug_folder_errors(hlo):
            hlo.mkdir(parents=True, exist_ok=True)
    steps = Steps(model, order["flags"], order, hlo, hlo_passes=order.get("debug_ir_passes", False))
    graph = steps.generate()
    program = steps.compile(graph)
    library = steps.link(graph, program)
    if debug_ir is not None:
        with convert_debug_folder_errors(debug_ir):
            for folder in (graph, program):
                shutil.copytree(folder, debug_ir, dirs_exist_ok=True)
    return steps.artifact(graph, library)


def describe_compiler() -> str:
    """Return names and versions of the tools. Raises UsageError if a tool is not installed."""
    return f"tfcompile {require_version('tensorflow', EXTRA)}, zig {require_version('ziglang', EXTRA)}"


class Steps:
    """Steps that compile a model to a program. Each step returns an output directory.

    Args:
        hlo: A directory for XLA's modules before and after optimization, as text and as graphs; or None.
        hlo_passes: Whether to write the modules after each pass.

    Raises:
        UsageError: a flag or the target is unknown, or a tool is not installed.
        CompileFailed, CompileCrashed, StageTimeout: a step failed. The message contains the step's name.
    """

    def __init__(
        self, model: Model, flags: Sequence[str], work: Work, hlo: Path | None = None, *, hlo_passes: bool = False
    ) -> None:
        self._hlo = {"hlo": str(hlo.absolute()) if hlo is not None else "", "hlo_passes": hlo_passes}
        self._target = parse_target(flags)
        self.compiler = describe_compiler()
        self.seconds: dict[str, float] = {}  # step -> seconds, for steps that were not cached
        self._model = model
        self._flags = tuple(flags)
        self._work = work
        self._log = str(work["log"].absolute())
        work["log"].parent.mkdir(parents=True, exist_ok=True)
        work["log"].touch()

    def generate(self) -> Path:
        """Generate the graph, the config and the values of variables."""
        what = {"function": self._model.function, "dims": dict(self._model.dims)}

        def make(folder: Path) -> None:
            path = str(self._model.path.absolute())
            call_isolated(tfcompile_graph.generate, {**what, "path": path, "folder": str(folder)}, self._work)

        return self._make_step(GENERATE, make, "tfcompile-graph", model=self._model.digest, **what)

    def compile(self, graph: Path) -> Path:
        """Compile a generated graph to a header and objects with tfcompile."""
        what = {"triple": self._target.triple, "cpu": self._target.cpu, "cpp_class": self._target.cpp_class}

        def make(folder: Path) -> None:
            arguments = {**what, **self._hlo, "source": str(graph), "folder": str(folder), "log": self._log}
            call_isolated(tfcompile_build.compile_graph, arguments, self._work)

        return self._make_step(COMPILE, make, "tfcompile-program", graph=read_digests(graph), **what)

    def link(self, graph: Path, program: Path) -> Path:
        """Link a program and XLA's runtime to a library."""
        target = self._target
        signature = write_signature(read_signature(self._model.function, graph))
        what = {"signature": signature, "target": target.zig, "cpp_class": target.cpp_class}

        def make(folder: Path) -> None:
            sources = tfcompile_build.find_needed_sources(read_text(program / HEADER))
            with ThreadPoolExecutor(self._work["isolated"].workers) as pool:
                objects = [str(one) for one in pool.map(self._compile_object, sources)]
            made = {"program": str(program), "objects": objects, "library": str(folder / LIBRARY), "log": self._log}
            call_isolated(tfcompile_build.link, {**what, **made}, self._work)

        return self._make_step(
            LINK, make, "tfcompile-library", program=read_digests(program), zig=get_version("ziglang"), **what
        )

    def artifact(self, graph: Path, library: Path) -> Artifact:
        """Return the artifact for a board: the library, and the values of variables unless they are arguments."""
        files, digests = {LIBRARY: library / LIBRARY}, {LIBRARY: read_digests(library)[LIBRARY]}
        signature = read_signature(self._model.function, graph)
        carried: Mapping[str, Array] = {}
        if self._target.variables:
            values = signature.values(read_file(graph / VALUES, MAX_MODEL_BYTES))
            carried = {name_new_value(name): value for name, value in values.items()}
        elif signature.variables:
            files[VALUES], digests[VALUES] = graph / VALUES, read_digests(graph)[VALUES]
        return Artifact(
            runtime=RUNTIME,
            main=LIBRARY,
            files=files,
            digests=digests,
            function=self._model.function,
            compiler=self.compiler,
            flags=self._flags,
            inputs=signature.inputs(variables=self._target.variables),
            outputs=signature.list_results(),
            cached=not self.seconds,
            seconds=sum(self.seconds.values()),
            log=self._work["log"],
            carried=carried,
        )

    def _make_step(self, step: str, make: Callable[[Path], None], kind: str, **parts: Any) -> Path:
        def fill(folder: Path) -> None:
            begin = time.monotonic()
            with convert_compiler_errors(f"{step}:", died=step, failed=step):
                try:
                    make(folder)
                except (CompileFailed, CompileCrashed) as error:
                    error.args = (f"{step}: {error.message}",)
                    raise
            self.seconds[step] = time.monotonic() - begin

        key, meta = _make_key(kind, **parts), {"model": self._model.name, "step": step}
        return self._work["cache"].get_or_make(key, meta, fill, self._work["recompute"])[0]

    def _compile_object(self, source: Path) -> Path:
        """Compile a source file of XLA's runtime."""
        target = self._target.zig

        def make(folder: Path) -> None:
            arguments = {"source": str(source), "target": target, "folder": str(folder), "log": self._log}
            call_isolated(tfcompile_build.compile_source, arguments, self._work)

        key = _make_key(
            "tfcompile-runtime",
            source=source.name,
            digest=digest_file(source),
            target=target,
            zig=get_version("ziglang"),
        )
        # Ignore `recompute`, because the object does not depend on the model.
        meta = {"model": f"XLA's runtime: {source.name}", "for": target}
        return self._work["cache"].get_or_make(key, meta, make)[0] / "object.o"


def _make_key(kind: str, **parts: Any) -> str:
    return Cache.key(kind, tensorflow=require_version("tensorflow", EXTRA), version=_VERSION, **parts)


def read_signature(function: str, graph: Path) -> LibrarySignature:
    """Return the signature that the library of a generated graph contains."""
    ports = tfcompile_graph.read_ports(graph)
    variables = (Argument(port.spec, True, not port.read_only) for port in ports.variables)
    return LibrarySignature(
        function,
        (*(Argument(port.spec) for port in ports.feeds), *variables),
        tuple(port.spec for port in ports.fetches),
    )


_TRIPLE, _CPU, _VARIABLES, _CLASS = "--target-triple", "--target-cpu", "--variables", "--cpp-class"
_FLAGS = (_TRIPLE, _CPU, _VARIABLES, _CLASS)
# C++ class name with namespaces. tfcompile itself rejects reserved words.
_CPP_CLASS = re.compile(r"(?:::)?(?:[A-Za-z_]\w*::)*[A-Za-z_]\w*", re.ASCII)
# CPU family -> (tfcompile's target, Zig's target). Programs for an old C library also run with newer libraries.
_TARGETS = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86_64-linux-gnu.2.17"),
    "aarch64": ("aarch64-unknown-linux-gnu", "aarch64-linux-gnu.2.17"),
}
_FAMILY = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class TfcompileTarget:
    """Compile target."""

    triple: str  # LLVM's target triple
    cpu: str  # LLVM's CPU name; "" is any CPU of the family
    zig: str  # Zig's target, including the C library
    cpp_class: str  # the program's class in the header, with namespaces
    variables: bool  # True if variables are arguments and results; False if the program stores them


def parse_target(flags: Sequence[str]) -> TfcompileTarget:
    """Parse the flags. Raises UsageError if a flag or the target is unknown."""
    # tfcompile spells this flag --target_triple.
    parted = (flag.partition("=") for flag in flags)
    given = {name.replace("_", "-"): value for name, _, value in parted}
    if unknown := sorted(set(given) - set(_FLAGS)):
        if unknown[0] in ("--graph", "--config"):
            hint, option = "specify the graph as MODEL and the config with --function", "--function"
        else:
            hint, option = f"supported flags: {', '.join(f'{flag}=' for flag in _FLAGS)}", ""
        raise UsageError(f"unsupported tfcompile flag {unknown[0]}", hint=hint, option=option)
    cpp_class = given.get(_CLASS) or tfcompile_build.CLASS
    if not _CPP_CLASS.fullmatch(cpp_class):
        raise UsageError(
            f"invalid {_CLASS} {cpp_class!r}: expected a C++ class name",
            hint=f"example: {_CLASS}=mynamespace::MyComputation",
        )
    variables = given.get(_VARIABLES, "inside")
    if variables not in ("inside", "outside"):
        raise UsageError(f"invalid {_VARIABLES} {variables!r}: expected 'inside' or 'outside'")
    machine = platform.machine().lower()
    triple = given.get(_TRIPLE) or _TARGETS.get(_FAMILY.get(machine, machine), ("",))[0]
    family = triple.split("-")[0]
    if _FAMILY.get(family, family) not in _TARGETS or "linux" not in triple:
        raise UsageError(
            f"unsupported tfcompile target {triple or machine}",
            hint=f"set {_TRIPLE} to one of: {', '.join(known for known, _ in _TARGETS.values())}",
        )
    zig = _TARGETS[_FAMILY.get(family, family)][1]
    return TfcompileTarget(triple, given.get(_CPU, ""), zig, cpp_class, variables == "outside")


def choose_target(machine: Mapping[str, Any]) -> BoardTarget:
    """Return the target for a machine description of a board (``arch``).

    For an unsupported architecture, the compilation raises an error.
    """
    arch = str(machine.get("arch", "")).lower()
    triple = f"{_FAMILY.get(arch, arch)}-unknown-linux-gnu"
    return BoardTarget((f"{_TRIPLE}={triple}",), triple) if arch else BoardTarget((), "")
