"""What is compiled for a board, the tables checked by the compiler's own word; and what a wrong target ends in."""

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
    described,
    iree_target,
    likely_cause,
)
from hil.controller.models.compiling import native_compiler
from hil.core.cpuinfo import cpu_info
from hil.errors import HilError, LoadFailed, RunCrashed, RunFailed, UsageError

# LLVM's features that a compiler can make use of by itself -> Linux's names, beyond those that hil passes on.
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
    """Flags -> the features that the compiler then uses; it has no complaint."""
    source = tmp_path_factory.mktemp("empty") / "empty.mlir"
    source.write_text("func.func @main() { return }")

    def ask(flags: tuple[str, ...]) -> set[str]:
        command = [str(native_compiler()), str(source), *flags, "--compile-to=preprocessing", "-o", "-"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        found = re.search(r'cpu = "([^"]*)", cpu_features = "([^"]*)"', done.stdout)
        assert found, done.stdout
        assert found[1] == option(flags, "cpu")
        return {feature[1:] for feature in found[2].split(",") if feature.startswith("+")}

    return ask


# ---- the tables


@pytest.mark.parametrize("cpu", ARM_CPUS, ids=lambda cpu: f"{cpu.part}={cpu.name}")
def test_the_compiler_knows_each_arm_cpu_and_uses_no_more_than_it_needs(cpu, features_of):
    target = iree_target({"arch": "aarch64", "cpu_parts": [cpu.part], "cpu_features": sorted(cpu.needs)})
    assert target.cpu == cpu.name
    linux = {llvm: name for name, llvm in ARM_FEATURES.items()} | MORE_ARM
    assert {linux[feature] for feature in features_of(target.flags) if feature in linux} <= cpu.needs


def test_the_compiler_takes_every_arm_feature(features_of):
    target = iree_target({"arch": "aarch64", "cpu_features": list(ARM_FEATURES)})
    assert target.cpu == "generic"
    assert set(ARM_FEATURES.values()) <= features_of(target.flags)


def test_arm_features_stand_in_the_order_of_the_architecture_whatever_a_board_shows_first():
    target = iree_target({"arch": "aarch64", "cpu_features": ["bf16", "atomics", "asimd", "fp"]})
    assert target.flags[-1].endswith("=+fp-armv8,+neon,+lse,+bf16")
    assert "with fp-armv8, neon, lse and 1 more" in target.description


@pytest.mark.parametrize("level", X86_LEVELS)
def test_the_compiler_takes_each_x86_level_and_feature(level, features_of):
    shown = X86_LEVELS[level]
    target = iree_target({"arch": "x86_64", "cpu_features": sorted(shown)})
    assert target.cpu == level
    assert target.flags[-1].endswith(level)
    assert {X86_FEATURES[name] for name in shown & X86_FEATURES.keys()} <= features_of(target.flags)
    more = iree_target({"arch": "x86_64", "cpu_features": sorted({*shown, *X86_FEATURES} - {"movbe", "avx512f"})})
    assert {"avx2", "gfni", "fma"} <= features_of(more.flags)


def test_the_compiler_takes_riscv(features_of):
    isa = ["rv64i" + RISCV_LETTERS, *RISCV_WORDS]
    target = iree_target({"arch": "riscv64", "cpu_features": isa})
    assert {*RISCV_LETTERS, *RISCV_WORDS} <= features_of(target.flags)


def test_the_compiler_takes_a_mac(features_of):
    assert "neon" in features_of(iree_target({"arch": "arm64", "system": "Darwin"}).flags)


# ---- the choice


@pytest.mark.parametrize(("number", "cpu"), [(3, "cortex-a53"), (4, "cortex-a72"), (5, "cortex-a76")])
def test_a_raspberry_pi_is_known_by_its_core(number, cpu):
    target = iree_target(pi(number))
    assert option(target.flags, "cpu") == cpu
    assert option(target.flags, "triple") == "aarch64-unknown-linux-gnu"
    assert cpu in target.description


def test_of_small_and_big_cores_the_big_ones_count():
    target = iree_target({**pi(3), "cpu_parts": ["0x41:0xd03", "0x41:0xd08"]})
    assert target.cpu == "cortex-a72"
    assert "beside cortex-a53" in target.description


def test_a_cpu_that_hides_a_feature_of_its_name_gets_generic_code_with_what_it_shows():
    board = pi(5)
    board["cpu_features"].remove("asimddp")
    target = iree_target(board)
    assert target.cpu == "generic"
    assert "cortex-a76, but does not show asimddp" in target.description
    features = option(target.flags, "cpu-features").split(",")
    assert "+lse" in features
    assert "+dotprod" not in features


def test_a_core_without_a_name_gets_generic_code_with_what_it_shows():
    target = iree_target({**pi(3), "cpu_parts": ["0x99:0x001"]})
    assert (target.cpu, option(target.flags, "cpu-features")) == ("generic", "+fp-armv8,+neon")
    assert "0x99:0x001" in target.description


def test_an_emulators_host_is_not_taken_for_the_board():
    shown = (
        cpu_info("aarch64", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else cpu_info("", "")
    )
    target = iree_target({"arch": "aarch64", "cpu_features": shown.features, "cpu_parts": shown.parts})
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
def test_an_x86_board_gets_the_highest_level_that_it_shows_in_full(shown, cpu, more):
    target = iree_target({"arch": "x86_64", "cpu_features": shown.split()})
    assert (target.cpu, option(target.flags, "cpu-features")) == (cpu, more)


@pytest.mark.parametrize("arch", ["x86_64", "aarch64", "riscv64"])
def test_a_board_that_shows_nothing_gets_what_every_such_cpu_runs(arch):
    target = iree_target({"arch": arch})
    assert "does not show" in target.description
    assert target.cpu in ("x86-64", "generic", "generic-rv64")


@pytest.mark.parametrize("machine", [{}, {"arch": "mips"}])
def test_a_machine_without_a_target_is_told_what_to_name(machine):
    with pytest.raises(UsageError, match="does not know what to compile for") as caught:
        iree_target(machine)
    assert "[compile_flags]" in caught.value.hint


# ---- a wrong one

A76 = described(iree_target(pi(5)).flags)


def test_an_illegal_instruction_is_laid_to_the_wrong_cpu():
    cause = likely_cause(RunCrashed("the program died of SIGILL"), A76, pi(3))
    assert "compiled for aarch64 cortex-a76, the board is aarch64 cortex-a53" in cause
    assert "--iree-llvmcpu-target-cpu=cortex-a53" in cause


def test_a_program_of_another_family_is_named_where_it_does_not_load():
    cause = likely_cause(LoadFailed("cannot load", detail="INCOMPATIBLE; executable"), A76, {"arch": "x86_64"})
    assert "compiled for aarch64 cortex-a76, the board is x86_64 x86-64" in cause
    assert "cannot be loaded there" in cause


def test_where_the_cpu_was_right_a_flag_is_suspected():
    assert "--compile-flag" in likely_cause(RunCrashed("SIGILL"), A76, pi(5))


def test_where_nothing_was_named_that_is_said():
    default = described(("--iree-hal-target-device=local",))
    assert "what the compiler takes by default" in likely_cause(RunCrashed("SIGILL"), default, pi(3))
    assert "compiled for a CPU that nobody named" in likely_cause(RunCrashed("SIGILL"), described(()), pi(3))


def test_a_machine_without_a_target_still_gets_a_cause():
    assert "the board is mips" in likely_cause(LoadFailed("INCOMPATIBLE"), A76, {"arch": "mips"})


@pytest.mark.parametrize(
    "error",
    [RunCrashed("the program died of SIGSEGV"), LoadFailed("no memory"), RunFailed("SIGILL"), HilError("INCOMPATIBLE")],
)
def test_other_failures_are_not_laid_to_the_cpu(error: HilError):
    assert likely_cause(error, A76, pi(3)) == ""
