"""Registry of runtimes: hil's (`RUNTIMES`), and those of installed packages (:func:`list_known_runtimes`).

Agent, simulator and controller take all facts about a runtime from its entry. Code is referenced as ``module:name``, so
that each side imports only its modules. To add a runtime to hil, see docs/internals/adding.md. A package registers a
runtime in the entry point groups ``hil.runtimes``, ``hil.compilers`` and ``hil.targets``, see docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hil.core.installed import list_entry_points

# Compiler name for programs that consist of the model's files, with or without a conversion.
NO_COMPILER = "none"
# Default for boards whose config does not specify a runtime.
DEFAULT_RUNTIME = "iree"
# Entry point groups of packages. The name of an entry point is the runtime.
RUNTIME_GROUP, COMPILER_GROUP, TARGET_GROUP = "hil.runtimes", "hil.compilers", "hil.targets"


@dataclass(frozen=True)
class Wheel:
    """Distribution to install on a board for a runtime."""

    name: str
    left_out: tuple[str, ...] = ()  # path patterns in the wheel that are not needed to run programs
    same_version: bool = False  # install the version of this machine, because the runtime must match the compiler
    cpu_build: bool = False  # install a build without CUDA (``1.2.3+cpu``), which loads on every machine


@dataclass(frozen=True)
class RuntimeInfo:
    """Runtime that loads and runs programs on a board."""

    name: str
    agent: str  # agent class, a :class:`hil.agent.runtimes.Runtime`; "" if this machine has only the compiler
    package: str = ""  # third-party import that may be missing; "" without any
    # True if the class and its description do not import ``package``. The agent then describes the runtime in its
    # process, and starts a separate process only on use.
    light: bool = True
    # Wheels for ``hil board deploy --runtime``; empty if the agent's packages suffice.
    wheels: tuple[Wheel, ...] = ()
    loads: str = ""  # model format that the runtime loads without compiling; "" without such a format
    only: bool = False  # True if this is the only runtime for the format, regardless of the board's default
    # Compiler name for ``--compiler`` and a board's ``compile_flags``.
    compiler: str = NO_COMPILER
    # The compiler, a :class:`hil.controller.backends.compilers.Compiler`; "" with :data:`NO_COMPILER`.
    compile: str = ""
    # Package of the compiler, if hil can install another version of it next to the installed version.
    compiler_package: str = ""
    # Function that creates a :class:`hil.controller.backends.targets.Target` from a board's description; "" if programs
    # run on any CPU.
    target: str = ""
    targets_host: bool = False  # True if the compiler targets the host by default
    # True if programs can be made from ONNX models, such as the small model for board checks.
    from_onnx: bool = False
    # Class on a simulated board, a :class:`hil.sim.runtime.SimRuntime`.
    simulator: str = "hil.sim.runtime:SimRuntime"
    of_package: bool = False  # True if a package registered the runtime or its compiler


_AGENT = "hil.agent.runtimes"
_COMPILERS = "hil.controller.backends.compilers"
_ALL = (
    RuntimeInfo(
        "iree",
        agent=f"{_AGENT}.iree:IreeRuntime",
        package="iree.runtime",
        light=False,
        wheels=(
            # Exclude IREE's tools, and its second copy for the Tracy profiler.
            Wheel(
                "iree-base-runtime",
                ("*/_runtime_libs_tracy/*", "*/_runtime_libs/iree-*", "*/_runtime_libs/share/*", "*.pyi"),
                same_version=True,
            ),
        ),
        loads="vmfb",
        only=True,
        compiler="iree",
        compile=f"{_COMPILERS}.iree:compile_iree",
        compiler_package="iree-base-compiler",
        target="hil.controller.backends.targets:choose_iree_target",
        from_onnx=True,
    ),
    RuntimeInfo(
        "onnxruntime",
        agent=f"{_AGENT}.onnxruntime:OnnxRuntime",
        package="onnxruntime",
        light=False,
        wheels=(
            # Exclude the C library: the Python module contains all of it.
            Wheel(
                "onnxruntime",
                ("*/transformers/*", "*/quantization/*", "*/tools/*", "*/datasets/*", "*/libonnxruntime.so.*"),
            ),
        ),
        loads="onnx",
        from_onnx=True,
        simulator="hil.sim.runtime:SimOnnxRuntime",
    ),
    RuntimeInfo(
        "tflite",
        agent=f"{_AGENT}.tflite:TfLiteRuntime",
        package="ai_edge_litert",
        wheels=(
            # The interpreter needs only a module and a library. Exclude the converter, the accelerators and the second
            # copy of LiteRT.
            Wheel(
                "ai-edge-litert",
                (
                    *(f"ai_edge_litert/{part}/*" for part in "aot tflite tools vendors".split()),
                    *("*/libLiteRt*.so", "*_pb2.py", "*/schema_py_generated.py"),
                    *("*/_pywrap_[!l]*", "*/pywrap_genai_ops.so"),
                ),
            ),
        ),
        loads="tflite",
        only=True,
    ),
    RuntimeInfo(
        "executorch",
        agent=f"{_AGENT}.executorch:ExecuTorchRuntime",
        package="executorch",
        wheels=(
            # Loading programs needs only the library. Export code and tools of other backends stay on the host.
            Wheel(
                "executorch",
                (
                    *(f"executorch/{part}/*" for part in "backends codegen data devtools examples exir".split()),
                    *(f"executorch/{part}/*" for part in "export include kernels runtime schema share util".split()),
                    *("executorch/extension/[!p]*/*", "*.pyi"),
                ),
            ),
            # ExecuTorch's library links to PyTorch's, and importing PyTorch runs most of its Python code. Exclude
            # compilers, headers, tests and tools. Keep bin/torch_shm_manager, which the import requires.
            Wheel(
                "torch",
                (
                    *(f"torch/{part}/*" for part in "_dynamo _inductor include onnx share test".split()),
                    *("torch/bin/[!t]*", "torch/bin/test_*", "functorch/*", "torchgen/packaged/*", "torch/lib/*.a"),
                    "*.pyi",
                ),
                cpu_build=True,
            ),
            Wheel("flatbuffers"),
        ),
        loads="pte",
        only=True,
        compiler="executorch",
        compile=f"{_COMPILERS}.executorch:compile_executorch",
    ),
    RuntimeInfo(
        "xla-aot",
        agent=f"{_AGENT}.xla_aot:XlaAotRuntime",
        loads="so",
        only=True,
        compiler="tfcompile",
        compile=f"{_COMPILERS}.tensorflow.tfcompile:compile_tfcompile",
        target=f"{_COMPILERS}.tensorflow.tfcompile:choose_target",
        targets_host=True,
    ),
    # An agent of its own runs the firmware: see hil.mcu.
    RuntimeInfo(
        "mcu",
        agent="",
        compiler="mcu",
        compile=f"{_COMPILERS}.firmware.compile:compile_firmware",
        compiler_package="iree-base-compiler",
        from_onnx=True,
    ),
)
RUNTIMES: Mapping[str, RuntimeInfo] = MappingProxyType({one.name: one for one in _ALL})


def list_known_runtimes() -> Mapping[str, RuntimeInfo]:
    """Return all runtimes by name: hil's, and those that installed packages register. Imports no package.

    A package may replace a runtime of hil, or only its compiler, by using the same name.
    """
    found = dict(RUNTIMES)
    for point in list_entry_points(RUNTIME_GROUP):
        own = found.get(point.name, RuntimeInfo(point.name, agent=""))
        # A package's class may import its library, so a separate process describes the runtime.
        found[point.name] = replace(own, agent=point.value, package="", light=False, of_package=True)
    for point in list_entry_points(COMPILER_GROUP):
        own = found.get(point.name, RuntimeInfo(point.name, agent="", light=False, of_package=True))
        if own.of_package and not own.compile:
            # A compiler of a package may accept ONNX models.
            found[point.name] = replace(own, compiler=point.name, compile=point.value, from_onnx=True)
    for point in list_entry_points(TARGET_GROUP):
        if point.name in found:
            found[point.name] = replace(found[point.name], target=point.value)
    return found


def can_load_onnx(runtime: str) -> bool:
    """Return whether programs for a runtime can be made from ONNX models. A package's compiler may still refuse one."""
    info = list_known_runtimes().get(runtime)
    return info is not None and info.from_onnx


def choose_runtime(model_format: str, wanted: str) -> str:
    """Return the runtime for a model: the user's choice, the only runtime for its format, or the board's default.

    Returns:
        The runtime's name; "" is the board's default.
    """
    return wanted or next((one.name for one in _ALL if one.only and one.loads == model_format), "")


def choose_compiler(model_format: str, runtime: str) -> str:
    """Return the compiler name for a runtime's programs.

    A package's compiler has the name of its runtime. Without a compiler, the runtime loads the model's files. The
    compiler of an unknown runtime, which only the board has, also has the runtime's name.
    """
    info = list_known_runtimes().get(runtime)
    if info is None:
        return runtime
    return NO_COMPILER if info.loads == model_format else info.compiler
