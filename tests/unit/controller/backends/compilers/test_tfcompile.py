"""tfcompile's config, link libraries and targets, without TensorFlow."""

from __future__ import annotations

import json
import platform
import re
from typing import NamedTuple

import pytest

from hil.controller.backends.compilers.tensorflow.tfcompile import choose_target, parse_target
from hil.controller.backends.compilers.tensorflow.tfcompile_build import find_needed_variants, is_needed, write_glue
from hil.controller.backends.compilers.tensorflow.tfcompile_graph import (
    find_assigned_variables,
    make_config,
    make_identifiers,
    split,
)
from hil.core.tensors import TensorSpec
from hil.errors import CompileFailed, UsageError
from hil.formats.xla_program import LibrarySignature, read_signature, write_signature


class Node(NamedTuple):
    """As much of TensorFlow's NodeDef as is looked at."""

    name: str
    op: str
    input: tuple[str, ...] = ()


GRAPH = [
    Node("function/x", "Placeholder"),
    Node("fc1/kernel", "VarHandleOp"),
    Node("fc1.kernel", "VarHandleOp"),
    Node("moving/mean", "VarHandleOp"),
    Node("read", "ReadVariableOp", ("fc1/kernel", "^function/x")),
    Node("same", "Identity", ("fc1/kernel:0",)),
    Node("again", "IdentityN", ("same",)),
    Node("assign", "AssignSubVariableOp", ("again:0", "function/x")),
    Node("look", "ReadVariableOp", ("moving/mean",)),
    Node("after", "NoOp", ("^moving/mean",)),
    Node("gather", "ResourceGather", ("fc1.kernel", "function/x")),
    Node("function/loss", "Mul", ("read", "look")),
]


def config(feed=(2, 4), nodes=GRAPH):
    feeds = {"function/x:0": TensorSpec("x", "float32", feed)}
    fetches = {"function/loss:0": TensorSpec("a/loss", "float32", ())}
    variables = {
        name: TensorSpec(name, "float32", (3,)) for name in ("fc1/kernel", "moving/mean", "fc1.kernel", "pruned")
    }
    return make_config(nodes, feeds, fetches, variables)


def test_variable_without_assignment_becomes_read_only():
    assert find_assigned_variables(GRAPH) == {"fc1/kernel"}
    assert {port.node: port.read_only for port in config().variables} == {
        "fc1/kernel": False,
        "moving/mean": True,
        "fc1.kernel": True,
    }


def test_variable_passed_to_function_counts_as_assigned():
    looped = [*GRAPH, Node("while", "While", ("moving/mean",))]
    assert find_assigned_variables(looped) == {"fc1/kernel", "moving/mean"}


def test_config_turns_scoped_names_into_unique_identifiers():
    told = config()
    assert [port.name for port in told.variables] == ["param_fc1_kernel", "param_moving_mean", "param_fc1_kernel_2"]
    assert [port.spec.name for port in told.variables] == ["fc1/kernel", "moving/mean", "fc1.kernel"]
    assert (told.feeds[0].name, told.feeds[0].node, told.feeds[0].output) == ("feed_x", "function/x", 0)
    assert told.fetches[0].name == "fetch_a_loss"
    name = make_identifiers()
    assert [name("param", text) for text in ("a/b", "a_b", "a_b_2", "ä")] == [
        "param_a_b",
        "param_a_b_2",
        "param_a_b_2_2",
        "param__",
    ]


@pytest.mark.parametrize(("text", "parts"), [("a/b:1", ("a/b", 1)), ("a", ("a", 0)), ("while:12", ("while", 12))])
def test_split_separates_node_and_output_index(text, parts):
    assert split(text) == parts


def test_config_rejects_open_shapes_and_missing_nodes():
    with pytest.raises(CompileFailed, match="requires static shapes, got x: "):
        config(feed=("batch", 4))
    with pytest.raises(CompileFailed, match="node 'function/loss' not found"):
        config(nodes=GRAPH[:-1])


def test_linker_includes_only_called_libraries():
    header = """
#include "xla/backends/cpu/runtime/kernel_c_api.h"
#include "xla/backends/cpu/runtime/dot_lib.h"
#include "xla/backends/cpu/runtime/convolution_lib.h"
   xla::cpu::internal::TypedMatMul<float, float, float>(device
   xla::cpu::internal::TypedMatMul<std::complex<double>, std::complex<double>>(device
   xla::cpu::internal::EigenConv2D<Eigen::half>(device
"""
    included, variants = find_needed_variants(header)
    assert included == {"dot_lib", "convolution_lib"}
    needed = {
        name
        for name in (
            "allocator rng_state_lib sort_lib dot_lib_f32 dot_lib_f64 dot_lib_c128 convolution_lib_f16_2d "
            "convolution_lib_f16_3d convolution_lib_f32_2d"
        ).split()
        if is_needed(name, included, variants)
    }
    assert needed == {"allocator", "rng_state_lib", "dot_lib_f32", "dot_lib_c128", "convolution_lib_f16_2d"}


def test_linker_includes_whole_library_for_unknown_type():
    included, variants = find_needed_variants(
        '#include "xla/backends/cpu/runtime/dot_lib.h"\ninternal::TypedMatMul<odd, odd>('
    )
    assert is_needed("dot_lib_f32", included, variants) and is_needed("dot_lib_s8", included, variants)
    assert not is_needed("sort_lib", included, variants)


def test_glue_source_escapes_hostile_names():
    names = ("x)hil", '"; } int evil() { return 0; } //', "a\\", "ü\n")
    signature = LibrarySignature("step", (), tuple(TensorSpec(name, "float32", ()) for name in names))
    (line,) = [line for line in write_glue(write_signature(signature)).splitlines() if "hil_xla_signature" in line]
    literal = re.fullmatch(r'.* return ("(?:[^"\\]|\\["\\])*"); }', line)
    assert literal and read_signature(json.loads(literal[1])) == signature


def test_target_defaults_to_host_architecture():
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    assert parse_target([]).triple.split("-")[0] == machine
    arm = parse_target(["--target-triple=aarch64-unknown-linux-gnu", "--target-cpu=cortex-a53", "--variables=outside"])
    assert (arm.zig, arm.cpu, arm.variables) == ("aarch64-linux-gnu.2.17", "cortex-a53", True)
    assert choose_target({"arch": "arm64"}).flags == ("--target-triple=aarch64-unknown-linux-gnu",)
    assert choose_target({}).flags == ()
    with pytest.raises(UsageError, match="unsupported tfcompile target riscv64"):
        parse_target(choose_target({"arch": "riscv64"}).flags)


def test_config_uses_given_port_names():
    feeds = {"function/x:0": TensorSpec("x", "float32", (2, 4))}
    fetches = {"function/loss:0": TensorSpec("loss", "float32", ())}
    variables = {name: TensorSpec(name, "float32", (3,)) for name in ("fc1/kernel", "moving/mean")}
    told = make_config(GRAPH, feeds, fetches, variables, {"function/x:0": "param_moving_mean", "fc1/kernel": "kernel"})
    assert [port.name for port in (*told.feeds, *told.fetches, *told.variables)] == [
        "param_moving_mean",
        "fetch_loss",
        "kernel",
        "param_moving_mean_2",
    ]


def test_target_accepts_class_in_tfcompile_spelling():
    for flag in ("--cpp_class=mynamespace::MyComputation", "--cpp-class=mynamespace::MyComputation"):
        assert parse_target([flag]).cpp_class == "mynamespace::MyComputation"
    assert "using Program = my::Step;" in write_glue("{}", "my::Step")
    assert parse_target(["--target_triple=aarch64-unknown-linux-gnu"]).zig == "aarch64-linux-gnu.2.17"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--cpp-class=a b", "expected a C.. class name"),
        ("--cpp-class=A; int evil", "expected a C.. class name"),
        ("--config=my.pbtxt", "unsupported tfcompile flag --config"),
        ("--target-tripel=x", "unsupported tfcompile flag --target-tripel"),
        ("--variables=beside", "invalid --variables 'beside': expected 'inside' or 'outside'"),
        ("--target-triple=riscv64-unknown-linux-gnu", "unsupported tfcompile target riscv64"),
        ("--target-triple=x86_64-pc-windows-msvc", "unsupported tfcompile target x86_64-pc-windows"),
    ],
)
def test_target_rejects_invalid_flags(flag, message):
    with pytest.raises(UsageError, match=message):
        parse_target([flag])
