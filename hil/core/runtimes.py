"""The runtimes that come with hil: all that agent, simulator and controller know of one is its entry in `RUNTIMES`.

Code is named as ``module:name``, so that nobody imports what belongs to another side. How to add a runtime:
docs/contributing.md. A package's own runtime has no entry: it registers under the entry-point groups ``hil.runtimes``
(on the board) and ``hil.compilers`` (on the host), see docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# The compiler that compiles nothing: a model's own files are the program, or those that it is converted into.
NO_COMPILER = "none"
# Of a board whose config names none.
DEFAULT_RUNTIME = "iree"


@dataclass(frozen=True)
class Wheel:
    """A distribution that is brought to a board for a runtime."""

    name: str
    left_out: tuple[str, ...] = ()  # patterns of the paths in the wheel that running a program does not need
    same_version: bool = False  # only the version that this machine has will do, for a compiler here belongs to it
    cpu_build: bool = False  # only a build without CUDA (``1.2.3+cpu``) can be loaded everywhere


@dataclass(frozen=True)
class RuntimeInfo:
    """A runtime: what loads a program on a board and runs it."""

    name: str
    agent: str  # its class on the board, a :class:`hil.agent.runtimes.Runtime`
    package: str = ""  # what that imports beside hil's own, which may not be installed; "" where there is nothing
    # importing the class and asking it to describe itself imports nothing of that, so the agent does it in its own
    # process and starts none for the runtime until it is used.
    light: bool = True
    # what ``hil board deploy --runtime`` brings; none where the agent's own packages are enough.
    wheels: tuple[Wheel, ...] = ()
    loads: str = ""  # the model format that it loads as it is; "" where all its programs are compiled
    only: bool = False  # no other runtime takes models of that format, whatever the board's own runtime is
    # the name of what makes its programs: of ``--compiler``, and of a board's ``compile_flags``.
    compiler: str = NO_COMPILER
    # that compiler, a :class:`hil.controller.backends.compilers.Compiler`; "" with :data:`NO_COMPILER`.
    compile: str = ""
    # the function that makes a :class:`hil.controller.backends.targets.Target` of what a board shows of itself; ""
    # where a program runs on any CPU.
    target: str = ""
    targets_host: bool = False  # without flags the compiler makes programs for the machine that it runs on
    # its programs can be made of ONNX models, such as the tiny one that a board is checked with.
    from_onnx: bool = False
    # its class on a simulated board, a :class:`hil.sim.runtime.SimRuntime`.
    simulator: str = "hil.sim.runtime:SimRuntime"


_AGENT = "hil.agent.runtimes"
_COMPILERS = "hil.controller.backends.compilers"
_ALL = (
    RuntimeInfo(
        "iree",
        agent=f"{_AGENT}.iree:IreeRuntime",
        package="iree.runtime",
        light=False,
        wheels=(
            # Left out: IREE's tools, and the second copy of it, which is made for the Tracy profiler.
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
        target="hil.controller.backends.targets:iree_target",
        from_onnx=True,
    ),
    RuntimeInfo(
        "onnxruntime",
        agent=f"{_AGENT}.onnxruntime:OnnxRuntime",
        package="onnxruntime",
        light=False,
        wheels=(
            # Left out: the library for C programs, for the Python module has all of it in itself.
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
            # The interpreter is one module and one library: no converter, no other accelerators, no second LiteRT.
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
            # To load a program takes the library alone; what exports one, and other backends' tools, stay on the host.
            Wheel(
                "executorch",
                (
                    *(f"executorch/{part}/*" for part in "backends codegen data devtools examples exir".split()),
                    *(f"executorch/{part}/*" for part in "export include kernels runtime schema share util".split()),
                    *("executorch/extension/[!p]*/*", "*.pyi"),
                ),
            ),
            # ExecuTorch's library is linked against PyTorch's, and importing PyTorch runs most of its Python; its
            # compilers, headers, tests and tools are for others. (It wants to see bin/torch_shm_manager.)
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
        compile=f"{_COMPILERS}.tfcompile:compile_tfcompile",
        target=f"{_COMPILERS}.tfcompile:tfcompile_target",
        targets_host=True,
    ),
)
RUNTIMES: Mapping[str, RuntimeInfo] = MappingProxyType({one.name: one for one in _ALL})


def runtime_for(model_format: str, wanted: str) -> str:
    """Return the runtime for a model: the one that the user wants, the only one that takes its format, or the board's.

    Returns:
        The runtime's name; "" is the board's own.
    """
    return wanted or next((one.name for one in _ALL if one.only and one.loads == model_format), "")


def compiler_for(model_format: str, runtime: str) -> str:
    """Return the name of the compiler that makes a runtime's program; a package's compiler has its runtime's name."""
    info = RUNTIMES.get(runtime)
    if info is None:
        return runtime
    return NO_COMPILER if info.loads == model_format else info.compiler
