"""TensorFlow's ahead-of-time compiler: functions of a model, training steps included, into libraries for any board.

Three steps, each in processes of their own and each cached by all it depends on: the graph and its config are
generated, tfcompile makes a header and objects of them, and these are linked with XLA's small runtime.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.backends.compilers import tfcompile_build, tfcompile_graph
from hil.controller.backends.compilers.tfcompile_command import HEADER
from hil.controller.backends.targets import Target as BoardTarget
from hil.controller.models.compiling import compiling
from hil.controller.storage.cache import Cache, digests_in
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.packages import needed_version, version
from hil.core.digest import digest_file
from hil.core.results import Artifact, Model
from hil.errors import CompileCrashed, CompileFailed, UsageError
from hil.formats.xla_program import LIBRARY, VALUES, Argument, Signature, write_signature

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hil.controller.models.compiling import CompileOrder

RUNTIME = "xla-aot"
FORMATS = ("tf", "keras")
GENERATE, COMPILE, LINK = "generate config", "compile", "link"
EXTRA = "tfcompile"
_LOG = "compile.log"
# Raise this when what a step makes changes: older ones in the cache are then not used.
_VERSION = 2


@dataclass
class Workplace:
    """What the steps share: the arguments of :func:`hil.controller.backends.compilers.compile_model`, and how long
    each took.
    """

    cache: Cache
    isolated: Isolated
    recompute: bool
    timeout: float | None
    log: Path
    seconds: dict[str, float]  # step -> how long it took, where it was not in the cache

    def make(self, step: str, key: str, model: str, call: Callable[[Path], None]) -> Path:
        """The folder of what a step makes, from the cache or made now.

        Raises:
            CompileFailed, CompileCrashed, StageTimeout: with the step in the message.
        """

        def fill(folder: Path) -> None:
            begin = time.monotonic()
            with compiling(f"{step}:", died=step, failed=step):
                try:
                    call(folder)
                except (CompileFailed, CompileCrashed) as error:
                    error.args = (f"{step}: {error.message}",)
                    raise
            self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - begin

        folder, _ = self.cache.get_or_make(key, {"model": model, "step": step}, fill, self.recompute)
        return folder

    def call(self, function: Callable[..., None], arguments: Mapping[str, Any]) -> None:
        """Call a function in a process of its own."""
        self.isolated.call(function, arguments, timeout=self.timeout, log=self.log)


def compile_tfcompile(model: Model, **order: Unpack[CompileOrder]) -> Artifact:
    """Compile a SavedModel's or a Keras model's function to a shared library.

    Flags: ``--target-triple=`` and ``--target-cpu=`` (this machine's family by default), and ``--variables=outside``,
    with which variables are inputs; by default the program keeps the model's own values. The new values of those that
    it assigns are outputs, after its own.

    Other arguments and errors are those of :func:`hil.controller.backends.compilers.compile_model`.
    """
    runtime, flags, log, debug_ir = order["runtime"], order["flags"], order["log"], order["debug_ir"]
    if model.format not in FORMATS or runtime != RUNTIME:
        raise UsageError(
            f"tfcompile makes programs for the runtime {RUNTIME} of TensorFlow's and Keras's models, not {runtime} "
            f"of {model.format}"
        )
    target = target_of(flags)
    by = compiler()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    place = Workplace(
        order["cache"], order["isolated"], order["recompute"] or debug_ir is not None, order["timeout"], log, {}
    )
    graph = generate(model, place)
    program = compile_graph(model, graph, target, place)
    library = link(model, graph, program, target, place)
    if debug_ir is not None:
        _copy_all((graph, program), debug_ir)
    return artifact_of(model, graph, library, target, flags, by, place)


def compiler() -> str:
    """Name and version of all that makes programs.

    Raises:
        UsageError: a part is not installed.
    """
    return f"tfcompile {needed_version('tensorflow', EXTRA)}, zig {needed_version('ziglang', EXTRA)}"


def generate(model: Model, place: Workplace) -> Path:
    """The folder with the graph, its config and the variables' values.

    Raises:
        CompileFailed, CompileCrashed, StageTimeout: it did not work.
    """
    key = Cache.key(
        "tfcompile-graph",
        model=model.digest,
        function=model.function,
        dims=dict(model.dims),
        tensorflow=needed_version("tensorflow", EXTRA),
        version=_VERSION,
    )
    what = {"path": str(model.path.absolute()), "function": model.function, "dims": dict(model.dims)}
    return place.make(
        GENERATE, key, model.name, lambda folder: place.call(tfcompile_graph.generate, {**what, "folder": str(folder)})
    )


def compile_graph(model: Model, graph: Path, target: Target, place: Workplace) -> Path:
    """The folder with the header and the objects that tfcompile makes of a generated graph.

    Raises:
        CompileFailed, CompileCrashed, StageTimeout: it did not work.
    """
    key = Cache.key(
        "tfcompile-program",
        graph=_content(graph),
        triple=target.triple,
        cpu=target.cpu,
        tensorflow=needed_version("tensorflow", EXTRA),
        version=_VERSION,
    )
    what = {"source": str(graph), "triple": target.triple, "cpu": target.cpu, "log": str(place.log.absolute())}

    def make(folder: Path) -> None:
        place.call(tfcompile_build.compile_graph, {**what, "folder": str(folder)})

    return place.make(COMPILE, key, model.name, make)


def link(model: Model, graph: Path, program: Path, target: Target, place: Workplace) -> Path:
    """The folder with the library that is linked of a program and XLA's runtime.

    Raises:
        CompileFailed, CompileCrashed, StageTimeout: it did not work.
    """
    signature = write_signature(signature_of(model.function, graph))
    key = Cache.key(
        "tfcompile-library",
        program=_content(program),
        signature=signature,
        tensorflow=needed_version("tensorflow", EXTRA),
        target=target.zig,
        zig=version("ziglang"),
        version=_VERSION,
    )

    def make(folder: Path) -> None:
        sources = tfcompile_build.needed_sources((program / HEADER).read_text())
        with ThreadPoolExecutor(place.isolated.workers) as pool:
            objects = list(pool.map(lambda source: _object(source, target, place), sources))
        what = {"program": str(program), "signature": signature, "objects": [str(one) for one in objects]}
        made = {"target": target.zig, "library": str(folder / LIBRARY), "log": str(place.log.absolute())}
        place.call(tfcompile_build.link, {**what, **made})

    return place.make(LINK, key, model.name, make)


def _object(source: Path, target: Target, place: Workplace) -> Path:
    """A part of XLA's runtime, compiled once for each target."""
    key = Cache.key(
        "tfcompile-runtime",
        source=source.name,
        digest=digest_file(source),
        tensorflow=needed_version("tensorflow", EXTRA),
        target=target.zig,
        zig=version("ziglang"),
        version=_VERSION,
    )
    what = {"source": str(source), "target": target.zig, "log": str(place.log.absolute())}

    def make(folder: Path) -> None:
        place.call(tfcompile_build.compile_source, {**what, "folder": str(folder)})

    # Not asked to recompute: the model has no part in it.
    folder, _ = place.cache.get_or_make(key, {"model": f"XLA's runtime: {source.name}", "for": target.zig}, make)
    return folder / "object.o"


def signature_of(function: str, graph: Path) -> Signature:
    """What the library of a generated graph says of itself."""
    ports = tfcompile_graph.read_ports(graph)
    variables = (Argument(port.spec, True, not port.read_only) for port in ports.variables)
    return Signature(
        function,
        (*(Argument(port.spec) for port in ports.feeds), *variables),
        tuple(port.spec for port in ports.fetches),
    )


def artifact_of(
    model: Model, graph: Path, library: Path, target: Target, flags: Sequence[str], by: str, place: Workplace
) -> Artifact:
    """The program as a board gets it: the library and, unless they are arguments, the variables' values."""
    files, digests = {LIBRARY: library / LIBRARY}, {LIBRARY: digests_in(library)[LIBRARY]}
    signature = signature_of(model.function, graph)
    if not target.variables and signature.variables:
        files[VALUES], digests[VALUES] = graph / VALUES, digests_in(graph)[VALUES]
    return Artifact(
        runtime=RUNTIME,
        main=LIBRARY,
        files=files,
        digests=digests,
        function=model.function,
        compiler=by,
        flags=tuple(flags),
        inputs=signature.inputs(variables=target.variables),
        outputs=signature.results(),
        cached=not place.seconds,
        seconds=sum(place.seconds.values()),
        log=place.log,
    )


def _content(folder: Path) -> dict[str, str]:
    return dict(sorted(digests_in(folder).items()))


def _copy_all(folders: Sequence[Path], to: Path) -> None:
    import shutil

    try:
        for folder in folders:
            shutil.copytree(folder, to, dirs_exist_ok=True)
    except OSError as error:
        raise UsageError(f"{to} cannot be made: {error.strerror}", hint="--debug-ir names a folder") from error


_TRIPLE, _CPU, _VARIABLES = "--target-triple", "--target-cpu", "--variables"
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
    variables: bool  # whether the program's variables are arguments and results like others, and not kept with it


def target_of(flags: Sequence[str]) -> Target:
    """What the flags ask for.

    Raises:
        UsageError: a flag is none of ours, or the target is unknown.
    """
    given = {name: value for name, _, value in (flag.partition("=") for flag in flags)}
    if unknown := sorted(set(given) - {_TRIPLE, _CPU, _VARIABLES}):
        raise UsageError(f"tfcompile has no flag {unknown[0]}", hint=f"it has {_TRIPLE}=, {_CPU}= and {_VARIABLES}=")
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
    return Target(triple, given.get(_CPU, ""), _TARGETS[_FAMILY.get(family, family)][1], variables == "outside")


def tfcompile_target(machine: Mapping[str, Any]) -> BoardTarget:
    """Return what to compile for on a machine as a board shows it (``arch``).

    Compiling refuses a machine that there are no programs for.
    """
    arch = str(machine.get("arch", "")).lower()
    triple = f"{_FAMILY.get(arch, arch)}-unknown-linux-gnu"
    return BoardTarget((f"{_TRIPLE}={triple}",), triple) if arch else BoardTarget((), "")
