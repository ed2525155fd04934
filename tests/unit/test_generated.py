"""Generated files are what their sources make, and the agent needs only what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Everything of the controller and of other runtimes; importing one of them in an agent is a mistake.
NOT_ON_A_BOARD = "click rich onnx onnxruntime iree tenacity filelock platformdirs matplotlib sklearn tomli".split()


def test_the_generated_protocol_is_not_stale(tmp_path):
    environment = {**os.environ, "HIL_PYTHON": sys.executable}
    subprocess.run([ROOT / "scripts" / "gen_protos", tmp_path], check=True, env=environment)
    for path in sorted((ROOT / "hil" / "proto" / "v1").glob("*_pb2*")):
        assert (tmp_path / "hil" / "proto" / "v1" / path.name).read_text() == path.read_text(), "run scripts/gen_protos"


def test_the_agent_imports_with_nothing_but_its_own_dependencies():
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
def test_importing_hil_imports_nothing_heavy(module):
    program = (
        f"import sys, {module}; "
        "assert not {'numpy', 'grpc', 'onnx', 'onnxruntime', 'iree', 'click', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
