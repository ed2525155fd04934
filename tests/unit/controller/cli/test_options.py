"""Test options shared by several commands."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner

from hil.controller.cli.options import make_flow_option, refuse_with_resume
from hil.controller.cli.running.run import run
from hil.controller.cli.running.suite import suite
from hil.controller.pipeline.settings.options import parse_dims
from hil.errors import UsageError

SUITE_RUN = suite.commands["run"]


def called(command: click.Command, *words: str) -> object:
    """Return a command's result; its exceptions are raised here."""
    return CliRunner().invoke(command, words, standalone_mode=False, catch_exceptions=False).return_value


@pytest.mark.parametrize("verb", ["run", "compile", "suite"])
def test_shared_options_are_identical_in_all_commands(verb: str):
    command = getattr(importlib.import_module(f"hil.controller.cli.running.{verb}"), verb)
    commands = list(command.commands.values()) if isinstance(command, click.Group) else [command]
    shared = {
        "--dim", "--seed",
        "--rtol", "--atol", "--iterations", "--warmup", "--timeout", "--wait", "--fault",
        "--runtime-hw-type", "--identity", "--known-hosts", "--accept-new-host-key", "--debug-ir", "--recompute-cache",
    }  # fmt: skip
    first = {option.opts[0]: option for option in run.params}
    for option in (one for other in commands for one in other.params if one.opts[0] in shared):
        ours, theirs = option.to_info_dict(), first[option.opts[0]].to_info_dict()
        if theirs["multiple"] and not ours["multiple"]:
            # In a command with targets, each value is a target.
            theirs |= {
                "multiple": False,
                "default": "",
                "help": theirs["help"].replace("; repeatable: each value is a target", ""),
            }
        assert ours == theirs


@click.command()
@make_flow_option("iree")
def which(flow: str) -> str:
    return flow


def test_flow_option_rejects_second_flow():
    assert called(which) == "iree"
    assert called(which, "--flow", "my.toml:fast") == "my.toml:fast"
    with pytest.raises(UsageError, match="--flow is specified 2 times: iree, onnxruntime"):
        called(which, "--flow", "iree", "--flow", "onnxruntime")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("N",), "'N': expected NAME=SIZE"),
        (("=3",), "'=3': expected NAME=SIZE"),
        (("N=-1",), "'N=-1': expected NAME=SIZE"),
        (("N=²",), "'N=²': expected NAME=SIZE"),
        (("N=1", "M=2", "N=3"), "conflicting sizes for N: 1 and 3"),
        (("N=3..1",), "'N=3..1': expected NAME=SIZE or NAME=LOW..HIGH: 3 is above 1"),
        (("N=1..",), "'N=1..': expected NAME=SIZE"),
        (("N=1..٣",), "expected NAME=SIZE"),
        (("N=1..4", "N=2"), "conflicting sizes for N: 1..4 and 2"),
    ],
)
def test_parse_dims_rejects_invalid_size(texts: tuple[str, ...], said: str):
    with pytest.raises(UsageError, match=f"--hil-dim .*{said}"):
        parse_dims(texts, "--hil-dim")


def test_parse_dims_accepts_ranges():
    assert parse_dims(("N=01..8", "M=2")) == {"N": "1..8", "M": 2}


def test_parse_dims_accepts_named_sizes():
    assert parse_dims(("N=1", "batch size=0", "N=1")) == {"N": 1, "batch size": 0}


@pytest.mark.parametrize("command", [run, SUITE_RUN])
@pytest.mark.parametrize("words", [("--board", "rpi5"), ("--seed", "0"), ("--recompute-cache",)])
def test_resume_rejects_options_of_new_run(command: click.Command, words: tuple[str, ...]):
    with pytest.raises(UsageError, match=f"{words[0]} cannot be given with --resume"):
        called(command, "--resume", "it", *words)


def test_resume_accepts_options_unrelated_to_run():
    @click.command()
    @click.option("--resume")
    @click.option("--seed", default=3)
    @click.option("--json", "as_json", is_flag=True)
    def one(**_: Callable[..., object]) -> str:
        refuse_with_resume("resume", "as_json")
        return "goes on"

    assert called(one, "--resume", "it", "--json") == "goes on"
