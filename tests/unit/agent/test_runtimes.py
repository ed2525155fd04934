"""The runtimes that the agent reports."""

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

LIGHT = [name for name, one in RUNTIMES.items() if one.light and one.agent]


class Runtime:
    """A runtime that does not compute."""

    @staticmethod
    def describe() -> dict[str, object]:
        return {"version": "1", "devices": ["cpu"]}


@pytest.mark.parametrize("name", [name for name, info in RUNTIMES.items() if info.agent])
def test_runtimes_define_init_outside_protocol(name: str) -> None:
    # Python 3.10 cannot instantiate such a class; newer versions can.
    kind = resolve(RUNTIMES[name].agent)
    own = [one for one in kind.__mro__[:-1] if not getattr(one, "_is_protocol", False)]
    assert any("__init__" in vars(one) for one in own)


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """Return a supervisor with one installed runtime and three whose package is missing."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    packages = {"there": "json", "absent": "no_such_package", "inner": "no_such_package.inner", "part": "json.no_part"}
    references = {name: "test_runtimes:Runtime" for name in packages}
    found = {name: RuntimeInfo(name, references[name], package) for name, package in packages.items()}
    for module in (runtimes, supervisor_module):
        monkeypatch.setattr(module, "list_known_runtimes", lambda: found)
    made = Supervisor(references, {})
    yield made
    made.close()


def test_supervisor_omits_missing_runtimes(supervisor: Supervisor):
    assert supervisor.describe() == {"there": {"version": "1", "devices": ["cpu"]}}


@pytest.mark.parametrize(
    ("name", "package"),
    [("absent", "no_such_package"), ("inner", "no_such_package.inner"), ("part", "json.no_part")],
)
def test_supervisor_take_lists_missing_package(supervisor: Supervisor, name: str, package: str):
    with pytest.raises(LoadFailed, match=f"'{name}' is not installed.* package {package}") as raised:
        supervisor.take(name, "")
    assert f"installed runtimes: there; install {name} over SSH with `hil board deploy --runtime" in raised.value.hint


def test_supervisor_take_lists_known_runtimes_for_unknown_name(supervisor: Supervisor):
    with pytest.raises(LoadFailed, match="runtime 'other' not found on this board") as raised:
        supervisor.take("other", "")
    assert raised.value.hint.startswith("did you mean 'there'? available runtimes: there; ")


@pytest.mark.parametrize("name", LIGHT)
def test_light_runtime_describe_imports_only_light_modules(name: str):
    program = (
        "import sys\n"
        "from hil.core.named import resolve\n"
        "from hil.core.runtimes import RUNTIMES\n"
        f"one = RUNTIMES[{name!r}]\n"
        "try:\n"
        "    resolve(one.agent).describe()\n"
        "except ImportError as error:\n"
        # The package may be missing here, but hil's module must exist.
        "    assert not (error.name or '').startswith('hil'), error\n"
        "heavy = {'torch', 'tensorflow', 'executorch', 'ai_edge_litert', 'iree', 'onnx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Workers are forked later, and a fork does not copy threads; preloading does the work of a first session.
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
def test_onnxruntime_preload_leaves_zero_threads():
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PRELOADED], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("0\n[1.5]\n", "")
