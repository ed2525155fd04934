"""Which runtimes there are, as the agent tells them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hil.agent import runtimes
from hil.agent import supervisor as supervisor_module
from hil.agent.supervisor import Supervisor
from hil.core.named import resolve
from hil.core.runtimes import RUNTIMES, RuntimeInfo
from hil.errors import LoadFailed

LIGHT = [name for name, one in RUNTIMES.items() if one.light]


class Runtime:
    """A runtime that does nothing."""

    @staticmethod
    def describe() -> dict[str, object]:
        return {"version": "1", "devices": ["cpu"]}


@pytest.mark.parametrize("name", RUNTIMES)
def test_no_runtime_inherits_the_making_of_a_protocol(name: str) -> None:
    # Python 3.10 lets nobody be made so; newer ones do.
    kind = resolve(RUNTIMES[name].agent)
    own = [one for one in kind.__mro__[:-1] if not getattr(one, "_is_protocol", False)]
    assert any("__init__" in vars(one) for one in own)


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """Of three runtimes: of one there is no package, of another only the package's parent."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    packages = {"there": "json", "absent": "no_such_package", "inner": "no_such_package.inner", "part": "json.no_part"}
    references = {name: "test_runtimes:Runtime" for name in packages}
    found = {name: RuntimeInfo(name, references[name], package) for name, package in packages.items()}
    for module in (runtimes, supervisor_module):
        monkeypatch.setattr(module, "RUNTIMES", found)
    made = Supervisor(references, {})
    yield made
    made.close()


def test_a_runtime_that_is_not_installed_is_not_told(supervisor: Supervisor):
    assert supervisor.describe() == {"there": {"version": "1", "devices": ["cpu"]}}


@pytest.mark.parametrize(
    ("name", "package"),
    [("absent", "no_such_package"), ("inner", "no_such_package.inner"), ("part", "json.no_part")],
)
def test_whoever_asks_for_it_hears_what_it_needs(supervisor: Supervisor, name: str, package: str):
    with pytest.raises(LoadFailed, match=f"'{name}' is not installed.* package {package}") as raised:
        supervisor.take(name, "")
    assert "it has there; `hil board deploy --runtime" in raised.value.hint


def test_one_that_nobody_knows_is_named_beside_those_that_are_there(supervisor: Supervisor):
    with pytest.raises(LoadFailed, match="no runtime 'other'") as raised:
        supervisor.take("other", "")
    assert raised.value.hint == "it has there"


@pytest.mark.parametrize("name", LIGHT)
def test_a_light_runtime_imports_nothing_heavy_to_be_described(name: str):
    program = (
        "import sys\n"
        "from hil.core.named import resolve\n"
        "from hil.core.runtimes import RUNTIMES\n"
        f"one = RUNTIMES[{name!r}]\n"
        "try:\n"
        "    resolve(one.agent).describe()\n"
        "except ImportError as error:\n"
        # What is not installed here; that hil's own module is there is what a light runtime promises.
        "    assert not (error.name or '').startswith('hil'), error\n"
        "heavy = {'torch', 'tensorflow', 'executorch', 'ai_edge_litert', 'iree', 'onnx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Workers are forked afterwards, and a fork takes no thread along; what a first session does, none of them has to do.
PRELOADED = """
import os
from hil.agent.runtimes import onnxruntime as runtime

threads = len(os.listdir("/proc/self/task"))
runtime.OnnxRuntime.preload()
print(len(os.listdir("/proc/self/task")) - threads)
session = runtime.ort.InferenceSession(runtime._IDENTITY, providers=["CPUExecutionProvider"])
print(session.run(None, {"x": [1.5]})[0].tolist())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_preloading_onnx_runtime_leaves_no_thread():
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PRELOADED], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("0\n[1.5]\n", "")
