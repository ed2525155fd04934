"""Options in messages, as each interface names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hil
from hil.controller.pipeline.settings.option_names import format_keyword, make_renamer, rename_options
from hil.errors import UsageError
from hil.testing.pytest_plugin.options import OPTIONS, rename_for_pytest

ROOT = Path(hil.__file__).parent


@pytest.mark.parametrize(
    ("text", "pytests", "librarys"),
    [
        ("give --dim N=1, or more", "give --hil-dim N=1, or more", "give dims={'N': 1}, or more"),
        ("raise it with --timeout, or stop", "raise it with --hil-timeout, or stop", "raise it with timeout, or stop"),
        ("--rtol 1e-3", "--hil-rtol 1e-3", "rtol=1e-3"),
        ("or --reference onnxruntime", "or --hil-reference onnxruntime", "or references=['onnxruntime']"),
        ("as --timeout says, stop", "as --hil-timeout says, stop", "as timeout says, stop"),
        ("see --timeout above.", "see --hil-timeout above.", "see timeout above."),
        ("raise --timeout 60.", "raise --hil-timeout 60.", "raise timeout=60."),
        ("with --allow-blind=y", "with --hil-allow-blind=y", "with allow_blind=['y']"),
        ("(--allow-flush=y accepts", "(--hil-allow-flush=y accepts", "(allow_flush=['y'] accepts"),
        ("(--reference onnx-reference)", "(--hil-reference onnx-reference)", "(references=['onnx-reference'])"),
        ("--no-fallback 3 times", "--hil-no-fallback 3 times", "no_fallback 3 times"),
        ("--dim N is open", "--hil-dim N is open", "dims N is open"),
        ("--dim N=1..8", "--hil-dim N=1..8", "dims={'N': '1..8'}"),
        ("(--arithmetic float32)", "(--hil-arithmetic float32)", "(arithmetic='float32')"),
        ("--input-range -1:1", "--hil-input-range -1:1", "input_range=(-1, 1)"),
        ('use --accept "y: kl<=1"', 'use --hil-accept "y: kl<=1"', "use accept=['y: kl<=1']"),
        ("--debug-ir DIR keeps it", "--hil-debug-ir DIR keeps it", "debug_ir=DIR keeps it"),
        ("--accept names output 'y'", "--hil-accept names output 'y'", "accept names output 'y'"),
        ("--profile DIR", "--hil-profile DIR", "--profile DIR"),
        ("hil bench MODEL --iterations 9", "hil bench MODEL --iterations 9", "hil bench MODEL --iterations 9"),
        ("`hil board deploy --runtime x` helps", *["`hil board deploy --runtime x` helps"] * 2),
        ("--hil-dim N=1, --iree-opt-level=O2", *["--hil-dim N=1, --iree-opt-level=O2"] * 2),
    ],
)
def test_rename_options_uses_names_of_interface(text: str, pytests: str, librarys: str) -> None:
    assert (rename_for_pytest(text), rename_options(text, format_keyword)) == (pytests, librarys)
    assert rename_options(text, make_renamer({})) == text


def test_pytest_options_rename_from_hil_options() -> None:
    for option in OPTIONS:
        assert rename_for_pytest(option.name) == option.name
        if option.name not in ("--hil-profile", "--hil-compile-time-profile"):
            assert rename_for_pytest(option.name.replace("--hil-", "--")) == option.name


@pytest.mark.ci
def test_library_errors_name_keywords() -> None:
    with pytest.raises(UsageError) as caught, hil.connect("sim") as board:
        hil.run("model.onnx", board, timeout=0.0)
    assert caught.value.message == "timeout must be above 0 seconds"


def test_pytest_plugin_renames_options_in_errors() -> None:
    files = list((ROOT / "testing" / "pytest_plugin").glob("*.py"))
    assert any("rename_for_pytest(" in file.read_text() for file in files)
    for file in files:
        found = re.findall(r"visible\(.*\berror\b", file.read_text())
        assert not found, f"{file.name} shows an error without renaming its options"
