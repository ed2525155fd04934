"""Compile targets of boards, checked with the compiler, and causes of failures with a wrong target."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hil.controller.backends.targets import (
    ARM_CPUS,
    ARM_FEATURES,
    RISCV_LETTERS,
    RISCV_WORDS,
    X86_FEATURES,
    X86_LEVELS,
    choose_iree_target,
    describe_target,
    find_likely_cause,
)
from hil.controller.models.compiling import find_native_compiler
from hil.core.cpuinfo import parse_cpu_info
from hil.errors import ErrorCode, HilError, LoadFailed, RunCrashed, RunFailed, UsageError

# LLVM features that a compiler may use without a flag -> Linux names, in addition to the passed features.
MORE_ARM = {
    **{"jsconv": "jscvt", "rcpc-immo": "ilrcpc", "flagm": "flagm", "altnz": "flagm2", "fptoint": "frint"},
    **{"lse2": "uscat", "sha3": "sha3", "sve-bitperm": "svebitperm", "sve2-bitperm": "svebitperm"},
}


def pi(number: int) -> dict:
    """A Raspberry Pi as Describe has it."""
    parts = {3: "0x41:0xd03", 4: "0x41:0xd08", 5: "0x41:0xd0b"}
    features = "fp asimd evtstrm crc32 cpuid".split()
    if number == 5:
        features += "aes pmull sha1 sha2 atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp".split()
    return {"arch": "aarch64", "system": "Linux", "cpu_features": features, "cpu_parts": [parts[number]]}


def option(flags: tuple[str, ...], name: str) -> str:
    return next((flag.partition("=")[2] for flag in flags if flag.startswith(f"--iree-llvmcpu-target-{name}=")), "")


@pytest.fixture(scope="module")
def features_of(tmp_path_factory):
    """Return a function that lists the features the compiler uses for given flags."""
    source = tmp_path_factory.mktemp("empty") / "empty.mlir"
    source.write_text("func.func @main() { return }")

    def ask(flags: tuple[str, ...]) -> set[str]:
        command = [str(find_native_compiler()), str(source), *flags, "--compile-to=preprocessing", "-o", "-"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        found = re.search(r'cpu = "([^"]*)", cpu_features = "([^"]*)"', done.stdout)
        assert found, done.stdout
        assert found[1] == option(flags, "cpu")
        return {feature[1:] for feature in found[2].split(",") if feature.startswith("+")}

    return ask


# ---- the tables


@pytest.mark.ci
@pytest.mark.parametrize("cpu", ARM_CPUS, ids=lambda cpu: f"{cpu.part}={cpu.name}")
def test_compiler_knows_arm_cpu_and_uses_needed_features_only(cpu, features_of):
    target = choose_iree_target({"arch": "aarch64", "cpu_parts": [cpu.part], "cpu_features": sorted(cpu.needs)})
    assert target.cpu == cpu.name
    linux = {llvm: name for name, llvm in ARM_FEATURES.items()} | MORE_ARM
    assert {linux[feature] for feature in features_of(target.flags) if feature in linux} <= cpu.needs


def test_compiler_accepts_every_arm_feature(features_of):
    target = choose_iree_target({"arch": "aarch64", "cpu_features": list(ARM_FEATURES)})
    assert target.cpu == "generic"
    assert set(ARM_FEATURES.values()) <= features_of(target.flags)


def test_arm_features_follow_architecture_order():
    target = choose_iree_target({"arch": "aarch64", "cpu_features": ["bf16", "atomics", "asimd", "fp"]})
    assert target.flags[-1].endswith("=+fp-armv8,+neon,+lse,+bf16")
    assert "with fp-armv8, neon, lse and 1 more" in target.description


@pytest.mark.parametrize("level", X86_LEVELS)
def test_compiler_accepts_every_x86_level_and_feature(level, features_of):
    shown = X86_LEVELS[level]
    target = choose_iree_target({"arch": "x86_64", "cpu_features": sorted(shown)})
    assert target.cpu == level
    assert target.flags[-1].endswith(level)
    assert {X86_FEATURES[name] for name in shown & X86_FEATURES.keys()} <= features_of(target.flags)
    more = choose_iree_target(
        {"arch": "x86_64", "cpu_features": sorted({*shown, *X86_FEATURES} - {"movbe", "avx512f"})}
    )
    assert {"avx2", "gfni", "fma"} <= features_of(more.flags)


def test_compiler_accepts_riscv_features(features_of):
    isa = ["rv64i" + RISCV_LETTERS, *RISCV_WORDS]
    target = choose_iree_target({"arch": "riscv64", "cpu_features": isa})
    assert {*RISCV_LETTERS, *RISCV_WORDS} <= features_of(target.flags)


def test_compiler_accepts_mac_target(features_of):
    assert "neon" in features_of(choose_iree_target({"arch": "arm64", "system": "Darwin"}).flags)


# ---- the choice


@pytest.mark.parametrize(("number", "cpu"), [(3, "cortex-a53"), (4, "cortex-a72"), (5, "cortex-a76")])
def test_target_identifies_raspberry_pi_by_core(number, cpu):
    target = choose_iree_target(pi(number))
    assert option(target.flags, "cpu") == cpu
    assert option(target.flags, "triple") == "aarch64-unknown-linux-gnu"
    assert cpu in target.description


def test_target_uses_big_cores():
    target = choose_iree_target({**pi(3), "cpu_parts": ["0x41:0xd03", "0x41:0xd08"]})
    assert target.cpu == "cortex-a72"
    assert "other cores: cortex-a53" in target.description


def test_target_falls_back_to_generic_for_hidden_feature():
    board = pi(5)
    board["cpu_features"].remove("asimddp")
    target = choose_iree_target(board)
    assert target.cpu == "generic"
    assert "cortex-a76, but does not report asimddp" in target.description
    features = option(target.flags, "cpu-features").split(",")
    assert "+lse" in features
    assert "+dotprod" not in features


def test_target_falls_back_to_generic_for_unknown_core():
    target = choose_iree_target({**pi(3), "cpu_parts": ["0x99:0x001"]})
    assert (target.cpu, option(target.flags, "cpu-features")) == ("generic", "+fp-armv8,+neon")
    assert "0x99:0x001" in target.description


def test_target_ignores_cpu_of_emulator_host():
    shown = (
        parse_cpu_info("aarch64", Path("/proc/cpuinfo").read_text())
        if Path("/proc/cpuinfo").exists()
        else parse_cpu_info("", "")
    )
    target = choose_iree_target({"arch": "aarch64", "cpu_features": shown.features, "cpu_parts": shown.parts})
    assert option(target.flags, "triple").startswith("aarch64")
    assert "avx" not in " ".join(target.flags)


@pytest.mark.parametrize(
    ("shown", "cpu", "more"),
    [
        ("sse2", "x86-64", ""),
        ("sse2 avx2", "x86-64", "+avx2"),
        ("cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3", "x86-64-v2", ""),
        ("cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 avx avx_vnni", "x86-64-v2", "+avx,+avxvnni"),
    ],
)
def test_x86_target_uses_highest_complete_level(shown, cpu, more):
    target = choose_iree_target({"arch": "x86_64", "cpu_features": shown.split()})
    assert (target.cpu, option(target.flags, "cpu-features")) == (cpu, more)


@pytest.mark.parametrize("arch", ["x86_64", "aarch64", "riscv64"])
def test_target_without_features_fits_every_cpu(arch):
    target = choose_iree_target({"arch": arch})
    assert "does not report" in target.description
    assert target.cpu in ("x86-64", "generic", "generic-rv64")


@pytest.mark.parametrize("machine", [{}, {"arch": "mips"}])
def test_unknown_architecture_error_names_setting(machine):
    with pytest.raises(UsageError, match="unsupported architecture") as caught:
        choose_iree_target(machine)
    assert "[compile_flags]" in caught.value.hint


# ---- wrong targets

A76 = describe_target(choose_iree_target(pi(5)).flags)
ILLEGAL = RunCrashed("the worker was killed", code=ErrorCode.ILLEGAL_INSTRUCTION)
WRONG_TARGET = LoadFailed("cannot load", code=ErrorCode.WRONG_TARGET)


def test_illegal_instruction_cause_names_wrong_cpu():
    cause = find_likely_cause(ILLEGAL, A76, pi(3))
    assert "compiled for aarch64 cortex-a76, the board is aarch64 cortex-a53" in cause
    assert "--iree-llvmcpu-target-cpu=cortex-a53" in cause


def test_load_failure_cause_names_architecture_mismatch():
    cause = find_likely_cause(WRONG_TARGET, A76, {"arch": "x86_64"})
    assert "compiled for aarch64 cortex-a76, the board is x86_64 x86-64" in cause
    assert "the board cannot load it" in cause


def test_cause_suspects_flag_if_cpu_matches():
    assert "--compile-flag" in find_likely_cause(ILLEGAL, A76, pi(5))


def test_cause_mentions_unnamed_cpu():
    default = describe_target(("--iree-hal-target-device=local",))
    assert "the compiler's default CPU" in find_likely_cause(ILLEGAL, default, pi(3))
    assert "compiled for an unspecified CPU" in find_likely_cause(ILLEGAL, describe_target(()), pi(3))


def test_cause_accepts_unknown_board_architecture():
    assert "the board is mips" in find_likely_cause(WRONG_TARGET, A76, {"arch": "mips"})


@pytest.mark.parametrize(
    "error",
    [RunCrashed("the program died of SIGSEGV"), LoadFailed("INCOMPATIBLE"), RunFailed("SIGILL")],
)
def test_other_failures_have_empty_cause(error: HilError):
    assert find_likely_cause(error, A76, pi(3)) == ""
