"""Define ExecuTorch backends: lowering, quantisation, and requirements of their programs.

Plugins register backends under the entry-point group ``hil.executorch_backends``. These functions, here and in plugins,
run in an isolated process. No other code imports ExecuTorch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hil.controller.storage.isolation.isolated import IsolatedFunction, get_function_name, make_function_version
from hil.controller.storage.sources.packages import load_registered, pick, require_version
from hil.core.guarded import guard
from hil.core.named import resolve
from hil.errors import CompileFailed, ImportFailed, NotRun, UsageError, did_you_mean

GROUP = "hil.executorch_backends"
_KIND = "ExecuTorch backend"


@dataclass(frozen=True)
class ExecuTorchBackend:
    """ExecuTorch backend, selected by ``--backend=NAME``.

    Functions are given as module-level functions or as ``module:function``, and run in an isolated process.

    ``lower(program, **options)`` receives a ``torch.export.ExportedProgram`` and returns the result of ExecuTorch's
    ``to_edge_transform_and_lower``. It may raise CompileFailed; other exceptions also become a COMPILE_ERROR.

    ``quantizer(per_channel, is_dynamic, **options)`` returns a configured quantizer of PyTorch's pt2e. It may raise
    ImportFailed; other exceptions also become an IMPORT_ERROR.

    Attributes:
        lower: see above.
        quantizer: see above; None if the backend does not support quantisation.
        options: compile flag ``--NAME=VALUE`` -> default text; both functions get all options.
        needs: names of the backend's delegates in a program, the main delegate first, and name prefixes of operators
            (``cortex_m::``). On boards that lack a delegate or operator of a program, the case is a SKIP.
        packages: distributions, in addition to ExecuTorch's, with versions that results depend on.
        environment: variables with the path of a vendor's SDK; a missing variable is a UsageError.
        fold_quantize: store weights quantised, see ``convert_pt2e``.
        version: increment it when programs change with the same packages and source files.
    """

    lower: IsolatedFunction
    quantizer: IsolatedFunction | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    fold_quantize: bool = True
    version: int = 1

    def given(self, name: str, options: Mapping[str, str]) -> dict[str, str]:
        """Return all options, including defaults. Raises UsageError for an unknown option or a missing SDK."""
        for option, value in options.items():
            if option not in self.options:
                known = "".join(f", --{one}={default}" for one, default in self.options.items())
                raise UsageError(
                    f"unsupported flag '--{option}={value}' of ExecuTorch backend {name}",
                    hint=f"{did_you_mean(option, self.options)}expected --backend=NAME{known}",
                )
        for variable in self.environment:
            if not os.environ.get(variable):
                raise UsageError(
                    f"ExecuTorch backend {name} requires the vendor's SDK: {variable} is not set",
                    hint=f"install the SDK and set {variable} to the SDK directory",
                )
        return {**self.options, **options}

    def functions(self) -> list[str]:
        """Return the names of the functions. Raises ValueError if a different process cannot import a function."""
        return [get_function_name(one) for one in (self.lower, self.quantizer) if one is not None]

    def made_by(self) -> dict[str, Any]:
        """Return all inputs of a program's cache key except model and options.

        Raises UsageError for a missing package.
        """
        versions = {package: require_version(package) for package in self.packages}
        return {
            "functions": [make_function_version(one) for one in self.functions()],
            "versions": versions,
            "version": self.version,
        }


def load_executorch_backends() -> dict[str, ExecuTorchBackend]:
    """Return all backends by name: hil's backends and the entry-point group."""
    return load_registered(GROUP, _BUILT_IN, ExecuTorchBackend, ExecuTorchBackend.functions)


def pick_backend(name: str) -> ExecuTorchBackend:
    """Return a backend by name. Raises UsageError for an unknown name."""
    return pick("backend", load_executorch_backends(), name)


def lower(name: str, program: Any, options: Mapping[str, str]) -> Any:
    """Lower a program. Runs in the isolated process."""
    function = pick_backend(name).lower
    with guard(_KIND, GROUP, name, CompileFailed, CompileFailed, NotRun, UsageError):
        return _call_function(function, program, **options)


def make_quantizer(name: str, per_channel: bool, is_dynamic: bool, options: Mapping[str, str]) -> Any:
    """Create a backend's quantizer. Runs in the isolated process."""
    backend = pick_backend(name)
    assert backend.quantizer is not None
    with guard(_KIND, GROUP, name, ImportFailed, ImportFailed, NotRun, UsageError):
        return _call_function(
            backend.quantizer, per_channel=per_channel, is_dynamic=is_dynamic, **{**backend.options, **options}
        )


def check_recipe_inputs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check the backend and options of a quantisation.

    Return the inputs of the cache key other than the recipe's settings.

    Raises:
        UsageError: the backend or option is unknown, or the backend does not support quantisation.
    """
    name, options = settings["backend"], settings["options"]
    backend = pick_backend(name)
    if backend.quantizer is None:
        able = ", ".join(one for one, other in load_executorch_backends().items() if other.quantizer)
        raise UsageError(f"ExecuTorch backend {name} has no quantizer", hint=f"backends with a quantizer: {able}")
    if not all(isinstance(value, str) for value in options.values()):
        raise UsageError(f"invalid options of ExecuTorch backend {name}: expected strings, got {options!r:.80}")
    return {**backend.made_by(), "options": backend.given(name, options)}


def _call_function(function: IsolatedFunction, *args: Any, **kwargs: Any) -> Any:
    return (resolve(function) if isinstance(function, str) else function)(*args, **kwargs)


def _lower_to_edge(program: Any, partitioner: Any = None, **more: Any) -> Any:
    """Lower with a partitioner. Operators outside PyTorch's core set are allowed; the board reports missing kernels."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    config = EdgeCompileConfig(_check_ir_validity=False)
    return to_edge_transform_and_lower(
        program, partitioner=[partitioner] if partitioner else [], **{"compile_config": config, **more}
    )


def lower_portable(program: Any) -> Any:
    """Lower to ExecuTorch's portable kernels only."""
    return _lower_to_edge(program)


def lower_xnnpack(program: Any) -> Any:
    """Delegate supported operators to XNNPACK."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return _lower_to_edge(program, XnnpackPartitioner())


def make_xnnpack_quantizer(per_channel: bool, is_dynamic: bool) -> Any:
    """Return a quantizer for XNNPACK's int8 arithmetic."""
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack

    config = xnnpack.get_symmetric_quantization_config(is_per_channel=per_channel, is_dynamic=is_dynamic)
    return xnnpack.XNNPACKQuantizer().set_global(config)


def lower_vulkan(program: Any) -> Any:
    """Delegate supported operators to Vulkan, except bool tensors, as in ExecuTorch's tester."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    return _lower_to_edge(program, VulkanPartitioner({"skip_bool_tensors": True}))


def make_vulkan_quantizer(per_channel: bool, is_dynamic: bool) -> Any:
    """Return a quantizer with int8 weights and a scale per channel, as Vulkan's shaders require."""
    from executorch.backends.vulkan.quantizer import vulkan_quantizer as vulkan

    config = vulkan.get_symmetric_quantization_config(is_dynamic=is_dynamic)
    return vulkan.VulkanQuantizer().set_global(config)


def lower_webgpu(program: Any) -> Any:
    """Delegate supported operators to WebGPU, which uses Vulkan's program format."""
    from executorch.backends.webgpu.partitioner import WebGPUPartitioner

    return _lower_to_edge(program, WebGPUPartitioner())


def lower_openvino(program: Any, device: str) -> Any:
    """Delegate supported operators to OpenVINO."""
    from executorch.backends.openvino.partitioner import OpenvinoPartitioner
    from executorch.exir.backend.backend_details import CompileSpec

    return _lower_to_edge(program, OpenvinoPartitioner([CompileSpec("device", device.encode())]))


def make_openvino_quantizer(per_channel: bool, is_dynamic: bool, device: str) -> Any:
    """Return a quantizer with the int8 settings of OpenVINO's tool NNCF."""
    from executorch.backends.openvino.quantizer.quantizer import OpenVINOQuantizer

    return OpenVINOQuantizer()


def lower_coreml(program: Any, deployment: str) -> Any:
    """Delegate supported operators to Core ML."""
    import coremltools
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    target = getattr(coremltools.target, deployment)
    specs = CoreMLBackend.generate_compile_specs(minimum_deployment_target=target)
    return _lower_to_edge(program, CoreMLPartitioner(compile_specs=specs))


def make_coreml_quantizer(per_channel: bool, is_dynamic: bool, deployment: str) -> Any:
    """Return a quantizer with int8 weights and 8-bit activations, as in ExecuTorch's tester for Core ML."""
    import torch
    from coremltools.optimize.torch import quantization
    from executorch.backends.apple.coreml.quantizer import CoreMLQuantizer

    config = quantization.ModuleLinearQuantizerConfig(
        quantization_scheme="symmetric",
        activation_dtype=torch.quint8,
        weight_dtype=torch.qint8,
        weight_per_channel=per_channel,
    )
    return CoreMLQuantizer(quantization.LinearQuantizerConfig(global_config=config))


def _make_arm_spec(target: str) -> Any:
    if target.startswith("ethos-u"):
        from executorch.backends.arm.ethosu import EthosUCompileSpec

        return EthosUCompileSpec(target)
    if target.startswith("vgf:"):
        from executorch.backends.arm.vgf import VgfCompileSpec

        return VgfCompileSpec(target.removeprefix("vgf:"))
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec

    return TosaCompileSpec(target)


def lower_arm(program: Any, target: str) -> Any:
    """Delegate supported operators to Arm's Ethos-U (compiled by Vela), TOSA or VGF."""
    from executorch.backends.arm.util._factory import create_partitioner

    return _lower_to_edge(program, create_partitioner(_make_arm_spec(target)))


def make_arm_quantizer(per_channel: bool, is_dynamic: bool, target: str) -> Any:
    """Return a quantizer for TOSA's int8 arithmetic."""
    from executorch.backends.arm.quantizer import get_symmetric_quantization_config
    from executorch.backends.arm.util._factory import create_quantizer

    config = get_symmetric_quantization_config(is_per_channel=per_channel, is_dynamic=is_dynamic)
    return create_quantizer(_make_arm_spec(target)).set_global(config)


def lower_cortex_m(program: Any, cpu: str) -> Any:
    """Rewrite operators to CMSIS-NN operators. These are kernels, not delegates."""
    from executorch.backends.cortex_m.edge_compile_config import cortex_m_edge_compile_config
    from executorch.backends.cortex_m.passes.cortex_m_pass_manager import CortexMPassManager
    from executorch.backends.cortex_m.target_config import CortexM, CortexMTargetConfig

    edge = _lower_to_edge(program, compile_config=cortex_m_edge_compile_config())
    target = CortexMTargetConfig(cpu=CortexM[cpu])
    passes = CortexMPassManager(edge.exported_program(), CortexMPassManager.pass_list, target_config=target)
    edge._edge_programs["forward"] = passes.transform()
    return edge


def make_cortex_m_quantizer(per_channel: bool, is_dynamic: bool, cpu: str) -> Any:
    """Return a quantizer for CMSIS-NN's int8 arithmetic."""
    from executorch.backends.cortex_m.quantizer.quantizer import CortexMQuantizer

    return CortexMQuantizer()


def lower_qnn(program: Any, soc: str, precision: str) -> Any:
    """Delegate supported operators to Qualcomm's QNN on the HTP."""
    from executorch.backends.qualcomm._passes.qnn_pass_manager import get_qnn_pass_manager_cls
    from executorch.backends.qualcomm.partition.qnn_partitioner import QnnPartitioner
    from executorch.backends.qualcomm.utils import utils as qnn

    options = qnn.generate_htp_compiler_spec(use_fp16=precision == "fp16")
    chip = qnn.get_soc_to_chipset_map()[soc]
    specs = qnn.generate_qnn_executorch_compiler_spec(soc_model=chip, backend_options=options)
    passes = get_qnn_pass_manager_cls(options.backend_type)()
    program = passes.transform_for_export_pipeline(program)
    return _lower_to_edge(program, QnnPartitioner(specs), transform_passes=passes.get_to_edge_transform_passes(program))


def make_qnn_quantizer(per_channel: bool, is_dynamic: bool, soc: str, precision: str) -> Any:
    """Return a quantizer for a ``precision`` of activations and weights: ``8a8w``, ``16a16w``, ``16a8w``, ``16a4w``."""
    from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer, QuantDtype
    from torchao.quantization.pt2e import MovingAverageMinMaxObserver

    quantizer = QnnQuantizer()
    quantizer.set_default_quant_config(
        QuantDtype[f"use_{precision}"],
        is_qat=False,
        is_conv_per_channel=per_channel,
        is_linear_per_channel=False,
        act_observer=MovingAverageMinMaxObserver,
    )
    return quantizer


_VELA = ("ethos-u-vela", "tosa-tools")
_BUILT_IN: Mapping[str, ExecuTorchBackend] = MappingProxyType(
    {
        "xnnpack": ExecuTorchBackend(lower_xnnpack, make_xnnpack_quantizer, needs=("XnnpackBackend",)),
        "portable": ExecuTorchBackend(lower_portable),
        "openvino": ExecuTorchBackend(
            lower_openvino,
            make_openvino_quantizer,
            options={"device": "CPU"},
            needs=("OpenvinoBackend",),
            packages=("openvino", "nncf"),
            fold_quantize=False,
        ),
        "vulkan": ExecuTorchBackend(lower_vulkan, make_vulkan_quantizer, needs=("VulkanBackend",)),
        "webgpu": ExecuTorchBackend(lower_webgpu, needs=("VulkanBackend",)),
        "coreml": ExecuTorchBackend(
            lower_coreml,
            make_coreml_quantizer,
            options={"deployment": "iOS17"},
            needs=("CoreMLBackend",),
            packages=("coremltools",),
        ),
        "ethos-u": ExecuTorchBackend(
            lower_arm, make_arm_quantizer, options={"target": "ethos-u55-128"}, needs=("EthosUBackend",), packages=_VELA
        ),
        "tosa": ExecuTorchBackend(
            lower_arm,
            make_arm_quantizer,
            options={"target": "TOSA-1.0+FP"},
            needs=("TOSABackend",),
            packages=("tosa-tools",),
        ),
        "vgf": ExecuTorchBackend(
            lower_arm,
            make_arm_quantizer,
            options={"target": "vgf:TOSA-1.0+FP"},
            needs=("VgfBackend",),
            packages=("tosa-tools", "ai_ml_sdk_model_converter"),
        ),
        "cortex-m": ExecuTorchBackend(
            lower_cortex_m,
            make_cortex_m_quantizer,
            options={"cpu": "M55"},
            needs=("cortex_m::",),
            packages=("tosa-tools",),  # imported by ExecuTorch's Cortex-M modules
        ),
        "qnn": ExecuTorchBackend(
            lower_qnn,
            make_qnn_quantizer,
            options={"soc": "SM8650", "precision": "fp16"},
            needs=("QnnBackend",),
            environment=("QNN_SDK_ROOT",),
        ),
    }
)
