"""Choose the flags of iree-compile for a board's CPU.

A program must never need an instruction that the board lacks. hil uses a CPU name only if the board reports all
features that the compiler uses for this name. Otherwise, hil compiles generic code with the reported features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hil.controller.backends.gpu_targets import TARGETED_DRIVERS, choose_gpu_flags
from hil.errors import ErrorCode, HilError, UsageError
from hil.formats.iree_devices import get_driver

_DEVICE = ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu")
_TRIPLE = "--iree-llvmcpu-target-triple="
_CPU = "--iree-llvmcpu-target-cpu="
_FEATURES = "--iree-llvmcpu-target-cpu-features="
_ABI = "--iree-llvmcpu-target-abi="

_FAMILY = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64", "riscv64": "riscv64"}


@dataclass(frozen=True)
class Target:
    """Compile target."""

    flags: tuple[str, ...]
    description: str  # readable text: the CPU and the source of this information
    arch: str = ""  # the CPU family: ``aarch64``
    cpu: str = ""  # LLVM's CPU name: ``cortex-a53``


def choose_iree_target(machine: Mapping[str, Any]) -> Target:
    """Return the target for a machine description from the Describe call.

    Args:
        machine: the description; its key "device" describes the configured device, if any.

    Raises:
        UsageError: unsupported architecture, or a GPU that the board does not describe.
    """
    device: Mapping[str, Any] = machine.get("device", {})
    wanted = str(device.get("id", ""))
    if (driver := get_driver(wanted)) in TARGETED_DRIVERS:
        return Target(*choose_gpu_flags(wanted, device), arch=driver)
    arch = str(machine.get("arch", ""))
    family = _FAMILY.get(arch.lower())
    if family is None:
        raise UsageError(
            f"unsupported architecture {arch or 'unknown'!r}: hil cannot choose the target",
            hint=f"set the target's flags in the board's config: [compile_flags] iree = [{_TRIPLE!r}..., ...]",
        )
    shown = set(map(str, machine.get("cpu_features", ())))
    source = "from the board's CPU features" if shown else "the board does not report CPU features"
    if family == "riscv64":
        return _choose_riscv_target(shown, source)
    if family == "x86_64":
        cpu, features = _choose_x86_level(shown)
        return _make_target(family, cpu, features, source)
    if machine.get("system") == "Darwin":
        return _make_target(family, "apple-m1", [], "common to all Macs with Apple silicon", system="apple-darwin")
    parts = [str(part).lower() for part in machine.get("cpu_parts", ())]
    named = [cpu for cpu in ARM_CPUS if cpu.part in parts]
    # A program's threads run on small and big cores. Use code for the big cores only if all cores support its
    # instructions.
    fitting = [cpu for cpu in named if cpu.needs <= shown]
    if fitting:
        others = [cpu.name for cpu in named if cpu.name != fitting[-1].name]
        beside = f", other cores: {', '.join(dict.fromkeys(others))}" if others else ""
        return _make_target(family, fitting[-1].name, [], f"CPU part {fitting[-1].part} of the board{beside}")
    if named:
        source = f"the board is a {named[-1].name}, but does not report {' '.join(sorted(named[-1].needs - shown))}"
    elif parts:
        source = f"unknown CPU part {', '.join(parts)}"
    return _make_target(family, "generic", [llvm for linux, llvm in ARM_FEATURES.items() if linux in shown], source)


def describe_target(flags: Sequence[str]) -> Target:
    """Return the target that flags of a config or a command line specify."""

    def find_last(option: str) -> str:
        return next((flag[len(option) :] for flag in reversed(flags) if flag.startswith(option)), "")

    arch, cpu = find_last(_TRIPLE).partition("-")[0], find_last(_CPU)
    return Target(tuple(flags), f"{arch} {cpu} (from the flags)".strip(), arch, cpu)


def explain(error: HilError, flags: Sequence[str], info: Mapping[str, Any], device: str = "") -> None:
    """Add a hint to the error if an IREE program was compiled with these flags for a different CPU."""
    if get_driver(device) in TARGETED_DRIVERS:
        return  # the board compares the program with its GPU, and gives a hint
    target = describe_target(flags)
    # A simulated board runs on this machine's CPU. So code for "host" is right, even if the board reports a different
    # CPU.
    if not (info.get("simulated") and target.cpu == "host"):
        error.hint = find_likely_cause(error, target, info["machine"]) or error.hint


def find_likely_cause(error: HilError, target: Target, machine: Mapping[str, Any]) -> str:
    """Return a hint if a program failed because the target differs from the board's CPU; else ""."""
    illegal = error.code is ErrorCode.ILLEGAL_INSTRUCTION
    if error.code is not ErrorCode.WRONG_TARGET and not illegal:
        return ""
    unnamed = "the compiler's default CPU" if target.flags else "an unspecified CPU"
    compiled = f"{target.arch} {target.cpu}".strip() or unnamed
    model = machine.get("cpu_model") or machine.get("model") or ""
    try:
        fitting = choose_iree_target(machine)
    except UsageError as unknown:
        return f"the program was compiled for {compiled}, the board is {machine.get('arch', 'unknown')}; {unknown.hint}"
    board = f"{fitting.arch} {fitting.cpu}" + (f" ({model})" if model else "")
    if (target.arch, target.cpu) == (fitting.arch, fitting.cpu):
        if illegal:
            return (
                f"the program was compiled for the board's CPU, {board}; a --compile-flag may enable a feature that "
                f"the CPU lacks: retry with {_CPU}generic"
            )
        return ""
    what = "the program uses instructions that this CPU lacks" if illegal else "the board cannot load it"
    flags = " ".join(flag for flag in fitting.flags if flag not in _DEVICE)
    return (
        f"the program was compiled for {compiled}, the board is {board}: {what}; "
        f"set [compile_flags] in the board's config to {flags}, or remove compile_flags: hil then uses these flags"
    )


def _make_target(arch: str, cpu: str, features: list[str], source: str, *, system: str = "unknown-linux-gnu") -> Target:
    flags = [*_DEVICE, f"{_TRIPLE}{arch}-{system}", f"{_CPU}{cpu}"]
    if features:
        flags.append(_FEATURES + ",".join(f"+{feature}" for feature in features))
    named = ", ".join(features[:3]) + (f" and {len(features) - 3} more" if len(features) > 3 else "")
    more = f" with {named}" if features else ""
    return Target(tuple(flags), f"{arch} {cpu}{more} ({source})", arch, cpu)


# ---- x86: LLVM's name -> the flags required in /proc/cpuinfo. Levels of the x86-64 psABI, highest first.
_V2 = set("cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3".split())
_V3 = _V2 | set("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_V4 = _V3 | set("avx512f avx512bw avx512cd avx512dq avx512vl".split())
X86_LEVELS = {"x86-64-v4": _V4, "x86-64-v3": _V3, "x86-64-v2": _V2, "x86-64": set[str]()}
# Features beyond a level: name in /proc/cpuinfo -> LLVM's name.
X86_FEATURES = {
    **{one: one for one in "popcnt ssse3 avx avx2 bmi2 f16c fma movbe gfni".split()},
    **{one: one for one in "avx512f avx512bw avx512cd avx512dq avx512vl avx512vbmi avx512ifma".split()},
    **{"sse4_1": "sse4.1", "sse4_2": "sse4.2", "bmi1": "bmi", "abm": "lzcnt", "avx_vnni": "avxvnni"},
    **{f"avx512_{one}": f"avx512{one}" for one in "vnni bf16 fp16 vbmi2 bitalg vpopcntdq".split()},
}


def _choose_x86_level(shown: set[str]) -> tuple[str, list[str]]:
    level, has = next((name, needs) for name, needs in X86_LEVELS.items() if needs <= shown)
    return level, [llvm for linux, llvm in X86_FEATURES.items() if linux in shown and linux not in has]


# ---- RISC-V: single-letter extensions are part of the first word of `isa`; other extensions are separate words.
RISCV_LETTERS = "mafdcv"
RISCV_WORDS = "zba zbb zbc zbs zfh zfhmin zvfh zicond".split()


def _choose_riscv_target(shown: set[str], source: str) -> Target:
    base = next((word for word in shown if word.startswith("rv64")), "")
    letters = [one for one in RISCV_LETTERS if one in base[4:].replace("g", "mafd")]
    # A board without an isa line also runs Linux, which requires rv64gc.
    features = [*(letters or "mafdc"), *(word for word in RISCV_WORDS if word in shown)]
    made = _make_target("riscv64", "generic-rv64", features, source)
    return Target((*made.flags, f"{_ABI}lp64d"), made.description, made.arch, made.cpu)


# ---- Arm: the kernel's feature name -> LLVM's name.
ARM_FEATURES = {
    "fp": "fp-armv8",
    "asimd": "neon",
    "atomics": "lse",
    "asimdrdm": "rdm",
    "asimdhp": "fullfp16",
    "asimddp": "dotprod",
    "asimdfhm": "fp16fml",
    "fcma": "complxnum",
    "lrcpc": "rcpc",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
}


@dataclass(frozen=True)
class ArmCpu:
    """Arm core type: ``implementer:part`` of /proc/cpuinfo, LLVM's name, and the features that the name enables."""

    part: str
    name: str
    needs: frozenset[str]


_ARM_LEVELS = {"v8": "fp asimd"}
_ARM_LEVELS["v8.1"] = _ARM_LEVELS["v8"] + " atomics asimdrdm"
_ARM_LEVELS["v8.2"] = _ARM_LEVELS["v8.1"] + " fphp asimdhp asimddp lrcpc"
_ARM_LEVELS["v8.4"] = _ARM_LEVELS["v8.2"] + " asimdfhm fcma jscvt ilrcpc flagm uscat"
_ARM_LEVELS["v8.6"] = _ARM_LEVELS["v8.4"] + " flagm2 frint i8mm bf16"
_ARM_LEVELS["v9"] = _ARM_LEVELS["v8.6"] + " sve sve2 svebitperm"

# Each line: implementer, level, cores as PART=NAME, features beyond the level. For each implementer, small cores are
# before big cores.
_ARM_TABLE = """
0x41 v8    d02=cortex-a34 d04=cortex-a35 d03=cortex-a53 d07=cortex-a57 d08=cortex-a72 d09=cortex-a73
0x41 v8.2  d05=cortex-a55 d06=cortex-a65 d43=cortex-a65ae d4a=neoverse-e1 d0a=cortex-a75 d0b=cortex-a76 d0e=cortex-a76ae
0x41 v8.2  d0d=cortex-a77 d41=cortex-a78 d42=cortex-a78ae d44=cortex-x1 d0c=neoverse-n1
0x41 v8.2  d4b=cortex-a78c + flagm
0x41 v8.2  d4c=cortex-x1c + flagm uscat ilrcpc
0x41 v9    d46=cortex-a510 d80=cortex-a520 d88=cortex-a520ae d47=cortex-a710 d4d=cortex-a715 d81=cortex-a720
0x41 v9    d89=cortex-a720ae d87=cortex-a725 d48=cortex-x2 d4e=cortex-x3 d82=cortex-x4 d85=cortex-x925
0x41 v8.4  d40=neoverse-v1 + i8mm bf16 sha3 sve
0x41 v9    d49=neoverse-n2 d8e=neoverse-n3 d4f=neoverse-v2 d84=neoverse-v3 d83=neoverse-v3ae
0x42 v8.1  516=thunderx2t99
0x43 v8    0a1=thunderxt88 0a2=thunderxt81 0a3=thunderxt83
0x43 v8.1  0af=thunderx2t99
0x46 v8.1  001=a64fx + fphp asimdhp fcma sve
0x48 v8.1  d01=tsv110 + fphp asimdhp asimddp asimdfhm fcma jscvt
0x4e v8.1  004=carmel + fphp asimdhp
0x51 v8    801=cortex-a53 800=cortex-a73 201=kryo 205=kryo 211=kryo
0x51 v8.2  803=cortex-a55 805=cortex-a55 802=cortex-a75 804=cortex-a76
0x51 v8.6  001=oryon-1 + sha3
0x61 v8.4  022=apple-m1 024=apple-m1 028=apple-m1 023=apple-m1 025=apple-m1 029=apple-m1 + flagm2 frint sha3
0x61 v8.6  032=apple-m2 034=apple-m2 038=apple-m2 033=apple-m2 035=apple-m2 039=apple-m2 + sha3
0x6d v9    d49=neoverse-n2
0xc0 v8.6  ac3=ampere1 ac4=ampere1a + sha3
"""


def _iter_arm_cpus() -> Iterator[ArmCpu]:
    for line in _ARM_TABLE.split("\n")[1:-1]:
        cores, _, more = line.partition("+")
        implementer, level, *names = cores.split()
        needs = frozenset(f"{_ARM_LEVELS[level]} {more}".split())
        for part, _, name in (one.partition("=") for one in names):
            yield ArmCpu(f"{implementer}:0x{part}", name, needs)


ARM_CPUS = tuple(_iter_arm_cpus())
