"""Flows by name and from files, and errors for invalid flows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hil.controller.cli.flows import flows as command
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.flow_registry import load_flow, load_flows, read_flows
from hil.core.config_files import trust
from hil.core.files import digest_file
from hil.errors import UsageError

BUILT_IN = [
    "iree",
    "iree-O3",
    "iree_vulkan",
    "iree_cuda",
    "iree-via-onnx",
    "iree-f16",
    "tflite",
    "onnxruntime",
    "onnxruntime-static-int8-per-channel",
    "onnxruntime-static-int8-per-tensor",
    "iree-static-int8-per-channel",
    "iree-static-int8-per-tensor",
    "onnxruntime-dynamic-int8",
    "iree-dynamic-int8",
    "executorch-portable",
    "xnnpack",
    "xnnpack-static-int8-per-channel",
    "xnnpack-static-int8-per-tensor",
    "xnnpack-dynamic-int8-per-channel",
    "openvino",
    "openvino-int8",
    "vulkan",
    "vulkan-static-int8-per-channel",
    "webgpu",
    "coreml",
    "coreml-static-int8",
    "arm-tosa-fp",
    "arm-tosa-int",
    "arm-ethos-u55",
    "arm-ethos-u85",
    "arm-vgf-fp",
    "arm-vgf-int",
    "cortex-m",
    "qnn",
    "qnn-16a16w",
    "qnn-16a8w",
    "qnn-16a4w",
    "qnn-8a8w",
]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str, name: str = "my.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_flows_lists_built_in_flows():
    assert list(load_flows()) == BUILT_IN
    for name, flow in load_flows().items():
        assert flow.name == name
        assert flow.description
        assert load_flow(name) == flow


def test_load_flow_reads_minimal_flow(written):
    path = written('[fast]\nruntime = "iree"\ncompile_flags = ["--iree-opt-level=O3"]\n')
    assert load_flow(str(path)) == Flow("fast", "iree", compile_flags=("--iree-opt-level=O3",))


def test_load_flow_reads_every_key(written):
    path = written(
        """
        [all]
        description = "everything"
        runtime = "iree"
        compiler = "iree"
        compile_flags = ["--a", "--b=c"]
        recipe = "static-int8"
        settings = { per_channel = true, samples = 3, method = "percentile" }
        rtol = 0
        quanta = 1
        min_sqnr_db = 12.5
        accept = ["logits: top1>=0.99"]
        """
    )
    assert load_flow(str(path)) == Flow(
        "all",
        "iree",
        compiler="iree",
        compile_flags=("--a", "--b=c"),
        recipe="static-int8",
        settings={"per_channel": True, "samples": 3, "method": "percentile"},
        rtol=0,
        quanta=1,
        min_sqnr_db=12.5,
        accept=("logits: top1>=0.99",),
        description="everything",
    )


def test_load_flow_selects_flow_after_colon(written):
    path = written('[one]\nruntime = "iree"\n[two]\nruntime = "onnxruntime"\n')
    assert load_flow(f"{path}:two").runtime == "onnxruntime"
    with pytest.raises(UsageError, match=r"expected one flow in .*, got 2") as caught:
        load_flow(str(path))
    assert f"{path}:one" in caught.value.hint
    with pytest.raises(UsageError, match="flow 'towo' not found") as caught:
        load_flow(f"{path}:towo")
    assert "did you mean 'two'" in caught.value.hint


def test_flows_toml_adds_names_but_preserves_built_in_flows(written, tmp_path: Path, monkeypatch):
    written('[mine]\nruntime = "iree"\n[iree]\nruntime = "iree"\ncompile_flags = ["--x"]\n', "flows.toml")
    assert load_flow("mine").runtime == "iree"
    assert load_flow("iree").compile_flags == ()
    monkeypatch.chdir("/")
    assert load_flow("mine", tmp_path).runtime == "iree"


def test_flows_toml_flags_require_trust(written, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = written('[mine]\nruntime = "iree"\ncompile_flags = ["-o", "/tmp/x"]\n', "flows.toml")
    assert "mine" in load_flows()
    with pytest.raises(UsageError, match=r"have not trusted.*compile_flags of the flow mine") as caught:
        load_flow("mine")
    assert "--flow flows.toml:mine" in caught.value.hint
    assert load_flow("flows.toml:mine").compile_flags and load_flow("mine", trusted=True).compile_flags
    trust(tmp_path, {path: digest_file(path)})
    assert load_flow("mine").compile_flags == ("-o", "/tmp/x")
    written('[mine]\nruntime = "iree"\ncompile_flags = ["-o", "/tmp/y"]\n', "flows.toml")
    with pytest.raises(UsageError, match="altered since"):
        load_flow("mine")


def test_load_flow_suggests_similar_name():
    with pytest.raises(UsageError, match="flow 'iree-03' not found") as caught:
        load_flow("iree-03")
    assert "did you mean 'iree-O3'" in caught.value.hint
    with pytest.raises(UsageError, match=r"flow file not found: nowhere\.toml"):
        load_flow("nowhere.toml")
    with pytest.raises(UsageError, match=r"flow file not found: nowhere\.toml"):
        load_flow("nowhere.toml:one")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[x\n", "cannot be read", ""),
        ("", "defines no flows", "[my-flow]"),
        ('runtime = "iree"', "[runtime] must be a table", "[my-flow]"),
        ("[x]\n", "[x]: missing runtime", "iree"),
        ('[x]\nruntime = "iree"\nrecipes = "float16"', "[x]: unknown key 'recipes'", "did you mean 'recipe'"),
        ("[x]\nruntime = 3", "[x] runtime must be a string, got 3", ""),
        ('[x]\nruntime = "iree"\nrtol = true', "[x] rtol must be a number, got True", ""),
        ('[x]\nruntime = "iree"\nrtol = "1"', "[x] rtol must be a number, got '1'", ""),
        ('[x]\nruntime = "iree"\ncompile_flags = "--a"', "[x] compile_flags must be a list of strings", ""),
        ('[x]\nruntime = "iree"\ncompile_flags = [1]', "[x] compile_flags must be a list of strings", ""),
        ('[x]\nruntime = "iree"\nsettings = 1', "[x] settings must be a table", ""),
        ('[x]\nruntime = "iree"\nsettings = {a = 1}', "settings require a recipe", ""),
        ('[x]\nruntime = "ire"', "runtime 'ire' not found", "did you mean 'iree'"),
        ('[x]\nruntime = "iree"\ncompiler = "ire"', "compiler 'ire' not found", "did you mean 'iree'"),
        ('[x]\nruntime = "iree"\nrecipe = "float61"', "recipe 'float61' not found", "did you mean 'float16'"),
        (
            '[x]\nruntime = "iree"\nrecipe = "static-int8"\nsettings = {per_chanel = true}',
            "unknown setting 'per_chanel' for the recipe static-int8",
            "did you mean 'per_channel'",
        ),
        (
            '[x]\nruntime = "iree"\nrecipe = "static-int8"\nsettings = {per_channel = 1}',
            "invalid value 1 for setting per_channel: expected bool",
            "per_channel = False",
        ),
        (
            '[x]\nruntime = "iree"\nrecipe = "static-int8"\nsettings = {samples = 0}',
            "invalid value 0 for setting samples: expected at least 1",
            "",
        ),
        ('[x]\nruntime = "iree"\nrtol = 1', "zeros would agree with every reference", ""),
        ('[x]\nruntime = "iree"\natol = -1', "atol is -1", ""),
        ('[x]\nruntime = "iree"\naccept = ["klx<=1"]', "invalid accept 'klx<=1'", "did you mean 'kl'"),
        ('[x]\nruntime = "iree"\naccept = ["python:j.py:f"]', "a Python function cannot be used here", ""),
        ('[x]\nruntime = "iree"\nquanta = nan', "invalid quanta nan", ""),
        ('[x]\nruntime = "iree"\nquanta = 1\natol = 1', "quanta and atol are mutually exclusive", ""),
        ('[x]\nruntime = "iree"\nmin_sqnr_db = 3', "min_sqnr_db requires a recipe", ""),
        ('[x]\nruntime = "iree"\nrecipe = "float16"\nmin_sqnr_db = nan', "invalid min_sqnr_db nan", ""),
    ],
)
def test_read_flows_error_names_file_and_flow(written, text: str, message: str, hint: str):
    path = written(text)
    with pytest.raises(UsageError) as caught:
        read_flows(path)
    assert str(path) in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_package_adds_flows_and_recipe(package):
    package(
        """
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.recipe import Recipe

ONE = Flow("vendor-one", "iree", recipe="vendor-recipe", settings={"bits": 3})
RECIPE = Recipe("vendor:apply", settings={"bits": 4})

def more():
    return [Flow("vendor-two", "iree"), Flow("iree", "iree", compile_flags=("--vendor",))]
""",
        "[hil.flows]\none = MODULE:ONE\nmore = MODULE:more\n[hil.recipes]\nvendor-recipe = MODULE:RECIPE\n",
    )
    found = load_flows()
    assert found["vendor-one"].settings == {"bits": 3}
    assert found["vendor-two"].runtime == "iree"
    assert found["iree"].compile_flags == ("--vendor",)  # replaces the built-in flow
    assert found.keys() == {*BUILT_IN, "vendor-one", "vendor-two"}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("X = 3", "must be a hil.plugins.Flow or a list of flows, got 3"),
        ("def X():\n    raise RuntimeError('no licence')", "failed: RuntimeError: no licence"),
        ("Y = 1", "failed: AttributeError"),
        (
            "from hil.controller.models.flows.flow import Flow\nX = Flow('x', 'iree', recipe='none')",
            "flow 'x': recipe 'none' not found",
        ),
    ],
)
def test_invalid_package_flow_raises_on_use(package, module: str, message: str):
    package(module, "[hil.flows]\nbroken = MODULE:X\n")
    found = load_flows()
    assert list(found) == BUILT_IN and load_flow("iree") == found["iree"]
    (name,) = found.broken
    with pytest.raises(UsageError, match=r"'broken' of hil\.flows \(package vendor 1.0\)") as caught:
        load_flow(name)
    assert message in caught.value.message
    with pytest.raises(UsageError, match="flow 'else' not found") as caught:
        load_flow("else")
    assert message in caught.value.hint


def test_invalid_package_flow_leaves_other_flows(package):
    package(
        """
from hil.plugins import Flow
FLOWS = [Flow("good", "iree"), Flow("typo", "onnxruntim"), Flow("odd", 3), Flow("board", "npu", compiler="none")]
""",
        "[hil.flows]\nall = MODULE:FLOWS\n",
    )
    assert list(load_flows()) == [*BUILT_IN, "good", "board"] and list(load_flows().broken) == ["typo", "odd"]
    with pytest.raises(
        UsageError, match=r"package vendor 1\.0\) flow 'typo': runtime 'onnxruntim' not found"
    ) as caught:
        load_flow("typo")
    assert "did you mean 'onnxruntime'" in caught.value.hint


def test_command_lists_broken_flows(package):
    package("X = 3", "[hil.flows]\nbroken = MODULE:X\n")
    listed = CliRunner().invoke(command, [])
    assert listed.exit_code == 0
    assert "iree-O3" in listed.output and "broken: unusable: the entry point 'broken'" in listed.output
    document = json.loads(CliRunner().invoke(command, ["--json"]).output)
    assert [one["name"] for one in document["broken"]] == ["broken"] and document["flows"]


def test_flow_without_settings_is_named_like_new_runtime() -> None:
    assert load_flow("iree").with_runtime("onnxruntime") == Flow(
        "onnxruntime", "onnxruntime", description="IREE, default options"
    )
    assert load_flow("iree-O3").with_runtime("onnxruntime").name == "iree-O3-onnxruntime"
    assert load_flow("iree-f16").with_runtime("onnxruntime").name == "iree-f16-onnxruntime"
    assert load_flow("iree-f16").with_runtime("iree").name == "iree-f16"
