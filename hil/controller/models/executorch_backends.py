"""ExecuTorch's backends: how each lowers a program, how it is quantised for it, what its programs need to run.

A package adds one under the entry-point group ``hil.executorch_backends``. The functions here and in such a package
are called in a process of its own; only they import ExecuTorch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hil.controller.storage.isolated import IsolatedFunction, function_name, function_version
from hil.controller.storage.packages import needed_version, pick, registered
from hil.core.guarded import guard
from hil.core.named import resolve
from hil.errors import CompileFailed, ImportFailed, NotRun, UsageError, did_you_mean

GROUP = "hil.executorch_backends"
_KIND = "ExecuTorch backend"


@dataclass(frozen=True)
class ExecuTorchBackend:
    """One backend of ExecuTorch, by the name that ``--backend=`` takes.

    A function is one of a module, or its ``module:function``: it is called in a process of its own.

    ``lower(program, **options)`` takes a ``torch.export.ExportedProgram`` and returns what ExecuTorch's
    ``to_edge_transform_and_lower`` does. It may raise CompileFailed; anything else that it raises becomes a
    COMPILE_ERROR too.

    ``quantizer(per_channel, is_dynamic, **options)`` returns a quantizer of PyTorch's pt2e, all set. It may raise
    ImportFailed; anything else that it raises becomes an IMPORT_ERROR too.

    Attributes:
        quantizer: None where programs are not quantised for it.
        options: compile flag ``--NAME=VALUE`` -> its default, a text; both functions get all of them.
        needs: names of its delegates in a program, the first that of ``--backend=``, and beginnings of the names of its
            operators (``cortex_m::``): a program that calls one which a board's runtime lacks is a SKIP.
        packages: distributions beside ExecuTorch's own, on whose versions results depend.
        environment: variables that say where a vendor's SDK is: where one is not set, that is a UsageError.
        fold_quantize: whether weights are stored quantised, as ``convert_pt2e`` does it.
        version: raise it when its programs change without those packages, and without the files of the functions.
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
        """All options, defaults among them. Raises UsageError: there is no such option, or no SDK."""
        for option, value in options.items():
            if option not in self.options:
                known = "".join(f", --{one}={default}" for one, default in self.options.items())
                raise UsageError(
                    f"ExecuTorch's backend {name} has no flag '--{option}={value}'",
                    hint=f"{did_you_mean(option, self.options)}it takes --backend=NAME{known}",
                )
        for variable in self.environment:
            if not os.environ.get(variable):
                raise UsageError(
                    f"ExecuTorch's backend {name} needs its vendor's SDK: {variable} is not set",
                    hint=f"install the SDK and set {variable} to its folder",
                )
        return {**self.options, **options}

    def functions(self) -> list[str]:
        """The names of its functions. Raises ValueError: another process cannot find one."""
        return [function_name(one) for one in (self.lower, self.quantizer) if one is not None]

    def made_by(self) -> dict[str, Any]:
        """What its programs depend on, beside model and options. Raises UsageError: a package is not installed."""
        versions = {package: needed_version(package) for package in self.packages}
        return {
            "functions": [function_version(one) for one in self.functions()],
            "versions": versions,
            "version": self.version,
        }


def executorch_backends() -> dict[str, ExecuTorchBackend]:
    """Every backend by name: hil's own and those of the entry-point group."""
    return registered(GROUP, _BUILT_IN, ExecuTorchBackend, ExecuTorchBackend.functions)


def pick_backend(name: str) -> ExecuTorchBackend:
    """The backend of a name. Raises UsageError: there is none."""
    return pick("backend", executorch_backends(), name)


def lower(name: str, program: Any, options: Mapping[str, str]) -> Any:
    """Lower a program; called in the isolated process."""
    function = pick_backend(name).lower
    with guard(_KIND, GROUP, name, CompileFailed, CompileFailed, NotRun, UsageError):
        return _called(function, program, **options)


def make_quantizer(name: str, per_channel: bool, is_dynamic: bool, options: Mapping[str, str]) -> Any:
    """A backend's quantizer; called in the isolated process."""
    backend = pick_backend(name)
    assert backend.quantizer is not None
    with guard(_KIND, GROUP, name, ImportFailed, ImportFailed, NotRun, UsageError):
        return _called(
            backend.quantizer, per_channel=per_channel, is_dynamic=is_dynamic, **{**backend.options, **options}
        )


def recipe_inputs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What quantising for a backend depends on beside a recipe's settings, which are checked.

    Raises:
        UsageError: there is no such backend or option, or nothing is quantised for it.
    """
    name, options = settings["backend"], settings["options"]
    backend = pick_backend(name)
    if backend.quantizer is None:
        able = ", ".join(one for one, other in executorch_backends().items() if other.quantizer)
        raise UsageError(f"ExecuTorch's backend {name} has no quantizer", hint=f"those with one: {able}")
    if not all(isinstance(value, str) for value in options.values()):
        raise UsageError(f"options of ExecuTorch's backend {name} are texts, not {options!r:.80}")
    return {**backend.made_by(), "options": backend.given(name, options)}


def _called(function: IsolatedFunction, *args: Any, **kwargs: Any) -> Any:
    return (resolve(function) if isinstance(function, str) else function)(*args, **kwargs)


def _edge(program: Any, partitioner: Any = None, **more: Any) -> Any:
    """Lower with one partitioner, operators beyond PyTorch's core ones too: the board says which its kernels lack."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    config = EdgeCompileConfig(_check_ir_validity=False)
    return to_edge_transform_and_lower(
        program, partitioner=[partitioner] if partitioner else [], **{"compile_config": config, **more}
    )


def lower_portable(program: Any) -> Any:
    """Leave everything to ExecuTorch's own kernels."""
    return _edge(program)


def lower_xnnpack(program: Any) -> Any:
    """Delegate to XNNPACK what it takes."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return _edge(program, XnnpackPartitioner())


def xnnpack_quantizer(per_channel: bool, is_dynamic: bool) -> Any:
    """Int8 as XNNPACK computes it."""
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack

    config = xnnpack.get_symmetric_quantization_config(is_per_channel=per_channel, is_dynamic=is_dynamic)
    return xnnpack.XNNPACKQuantizer().set_global(config)


def lower_vulkan(program: Any) -> Any:
    """Delegate to Vulkan what it takes, but tensors of bools, as ExecuTorch's tester does."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    return _edge(program, VulkanPartitioner({"skip_bool_tensors": True}))


def vulkan_quantizer(per_channel: bool, is_dynamic: bool) -> Any:
    """Int8 weights, a scale a channel, as Vulkan's shaders take them."""
    from executorch.backends.vulkan.quantizer import vulkan_quantizer as vulkan

    config = vulkan.get_symmetric_quantization_config(is_dynamic=is_dynamic)
    return vulkan.VulkanQuantizer().set_global(config)


def lower_webgpu(program: Any) -> Any:
    """Delegate to WebGPU, in Vulkan's form, what it takes."""
    from executorch.backends.webgpu.partitioner import WebGPUPartitioner

    return _edge(program, WebGPUPartitioner())


def lower_openvino(program: Any, device: str) -> Any:
    """Delegate to OpenVINO what it takes."""
    from executorch.backends.openvino.partitioner import OpenvinoPartitioner
    from executorch.exir.backend.backend_details import CompileSpec

    return _edge(program, OpenvinoPartitioner([CompileSpec("device", device.encode())]))


def openvino_quantizer(per_channel: bool, is_dynamic: bool, device: str) -> Any:
    """Int8 as OpenVINO's own tool, NNCF, would set it."""
    from executorch.backends.openvino.quantizer.quantizer import OpenVINOQuantizer

    return OpenVINOQuantizer()


def lower_coreml(program: Any, deployment: str) -> Any:
    """Delegate to Core ML what it takes."""
    import coremltools
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    target = getattr(coremltools.target, deployment)
    specs = CoreMLBackend.generate_compile_specs(minimum_deployment_target=target)
    return _edge(program, CoreMLPartitioner(compile_specs=specs))


def coreml_quantizer(per_channel: bool, is_dynamic: bool, deployment: str) -> Any:
    """Int8 weights and 8-bit activations, as ExecuTorch's tester sets them for Core ML."""
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


def _arm(target: str) -> Any:
    if target.startswith("ethos-u"):
        from executorch.backends.arm.ethosu import EthosUCompileSpec

        return EthosUCompileSpec(target)
    if target.startswith("vgf:"):
        from executorch.backends.arm.vgf import VgfCompileSpec

        return VgfCompileSpec(target.removeprefix("vgf:"))
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec

    return TosaCompileSpec(target)


def lower_arm(program: Any, target: str) -> Any:
    """Delegate to Arm's Ethos-U (compiled by Vela), to TOSA or to VGF what they take."""
    from executorch.backends.arm.util._factory import create_partitioner

    return _edge(program, create_partitioner(_arm(target)))


def arm_quantizer(per_channel: bool, is_dynamic: bool, target: str) -> Any:
    """Int8 as TOSA has it."""
    from executorch.backends.arm.quantizer import get_symmetric_quantization_config
    from executorch.backends.arm.util._factory import create_quantizer

    config = get_symmetric_quantization_config(is_per_channel=per_channel, is_dynamic=is_dynamic)
    return create_quantizer(_arm(target)).set_global(config)


def lower_cortex_m(program: Any, cpu: str) -> Any:
    """Rewrite operators to those of CMSIS-NN. Nothing is delegated: they are kernels of their own."""
    from executorch.backends.cortex_m.edge_compile_config import cortex_m_edge_compile_config
    from executorch.backends.cortex_m.passes.cortex_m_pass_manager import CortexMPassManager
    from executorch.backends.cortex_m.target_config import CortexM, CortexMTargetConfig

    edge = _edge(program, compile_config=cortex_m_edge_compile_config())
    target = CortexMTargetConfig(cpu=CortexM[cpu])
    passes = CortexMPassManager(edge.exported_program(), CortexMPassManager.pass_list, target_config=target)
    edge._edge_programs["forward"] = passes.transform()
    return edge


def cortex_m_quantizer(per_channel: bool, is_dynamic: bool, cpu: str) -> Any:
    """Int8 as CMSIS-NN computes it."""
    from executorch.backends.cortex_m.quantizer.quantizer import CortexMQuantizer

    return CortexMQuantizer()


def lower_qnn(program: Any, soc: str, precision: str) -> Any:
    """Delegate to Qualcomm's QNN, for its HTP, what it takes."""
    from executorch.backends.qualcomm._passes.qnn_pass_manager import get_qnn_pass_manager_cls
    from executorch.backends.qualcomm.partition.qnn_partitioner import QnnPartitioner
    from executorch.backends.qualcomm.utils import utils as qnn

    options = qnn.generate_htp_compiler_spec(use_fp16=precision == "fp16")
    chip = qnn.get_soc_to_chipset_map()[soc]
    specs = qnn.generate_qnn_executorch_compiler_spec(soc_model=chip, backend_options=options)
    passes = get_qnn_pass_manager_cls(options.backend_type)()
    program = passes.transform_for_export_pipeline(program)
    return _edge(program, QnnPartitioner(specs), transform_passes=passes.get_to_edge_transform_passes(program))


def qnn_quantizer(per_channel: bool, is_dynamic: bool, soc: str, precision: str) -> Any:
    """Bits of activations and weights as ``precision`` says: ``8a8w``, ``16a16w``, ``16a8w``, ``16a4w``."""
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
        "xnnpack": ExecuTorchBackend(lower_xnnpack, xnnpack_quantizer, needs=("XnnpackBackend",)),
        "portable": ExecuTorchBackend(lower_portable),
        "openvino": ExecuTorchBackend(
            lower_openvino,
            openvino_quantizer,
            options={"device": "CPU"},
            needs=("OpenvinoBackend",),
            packages=("openvino", "nncf"),
            fold_quantize=False,
        ),
        "vulkan": ExecuTorchBackend(lower_vulkan, vulkan_quantizer, needs=("VulkanBackend",)),
        "webgpu": ExecuTorchBackend(lower_webgpu, needs=("VulkanBackend",)),
        "coreml": ExecuTorchBackend(
            lower_coreml,
            coreml_quantizer,
            options={"deployment": "iOS17"},
            needs=("CoreMLBackend",),
            packages=("coremltools",),
        ),
        "ethos-u": ExecuTorchBackend(
            lower_arm, arm_quantizer, options={"target": "ethos-u55-128"}, needs=("EthosUBackend",), packages=_VELA
        ),
        "tosa": ExecuTorchBackend(
            lower_arm,
            arm_quantizer,
            options={"target": "TOSA-1.0+FP"},
            needs=("TOSABackend",),
            packages=("tosa-tools",),
        ),
        "vgf": ExecuTorchBackend(
            lower_arm,
            arm_quantizer,
            options={"target": "vgf:TOSA-1.0+FP"},
            needs=("VgfBackend",),
            packages=("tosa-tools", "ai_ml_sdk_model_converter"),
        ),
        "cortex-m": ExecuTorchBackend(
            lower_cortex_m,
            cortex_m_quantizer,
            options={"cpu": "M55"},
            needs=("cortex_m::",),
            packages=("tosa-tools",),  # which ExecuTorch's modules for Cortex-M import
        ),
        "qnn": ExecuTorchBackend(
            lower_qnn,
            qnn_quantizer,
            options={"soc": "SM8650", "precision": "fp16"},
            needs=("QnnBackend",),
            environment=("QNN_SDK_ROOT",),
        ),
    }
)
