"""Generated files match their sources, and the agent imports only its declared dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Packages of the controller and of other runtimes, which the agent must not import.
NOT_ON_A_BOARD = "click rich onnx onnxruntime iree tenacity filelock platformdirs matplotlib sklearn tomli".split()


def test_generated_protocol_matches_protos(tmp_path):
    environment = {**os.environ, "HIL_PYTHON": sys.executable}
    subprocess.run([ROOT / "scripts" / "gen_protos", tmp_path], check=True, env=environment)
    package = Path("hil/protocol/v1")
    committed = sorted((ROOT / package).glob("*_pb2.py*"))
    assert len(committed) == 4  # of agent.proto and farm.proto
    for path in committed:
        assert (tmp_path / package / path.name).read_text() == path.read_text(), "run scripts/gen_protos"


def test_agent_imports_only_declared_dependencies():
    blocked = ", ".join(repr(name) for name in NOT_ON_A_BOARD)
    program = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ({blocked},):
            raise ModuleNotFoundError(f"no {{name}} on a board")
sys.meta_path.insert(0, Missing())
import hil.agent.__main__, hil.agent.forkserver
assert not any(name.startswith("hil.controller") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("module", ["hil", "hil.traces", "hil.testing", "hil.testing.pytest_plugin"])
def test_import_hil_loads_only_light_modules(module):
    program = (
        f"import sys, {module}; "
        "assert not {'numpy', 'grpc', 'onnx', 'onnxruntime', 'iree', 'click', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
