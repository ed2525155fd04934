"""Installed package whose entry points fail if the model's name requests it: ``compile-exit.onnx``."""

from __future__ import annotations

from pathlib import Path

from onnx import TensorProto, helper

from support.models import save_model

# Failures that an entry point of the package can simulate.
WAYS = ("raise", "exit", "silent", "none", "wrong")
POINTS = """
[hil.compilers]
acme = acme:compile_model
[hil.runtimes]
acme = acme:Runtime
[hil.references]
acme = acme:reference
[hil.importers]
odd = acme:importer
[hil.recipes]
acme = acme:recipe
[hil.flows]
acme = acme:flow
[hil.links]
usb = acme:connect
[hil.board_providers]
lab = acme:Lab
[hil.bundle_formats]
acme = acme:form
[hil.executorch_backends]
acme = acme:backend
missing = acme_missing:backend
"""
MODULE = '''
import shutil
import sys
from pathlib import Path

import numpy as np

from hil.core.files import digest_file
from hil.core.tensors import TensorSpec
from hil.plugins import Artifact, ExecuTorchBackend, Flow, Format, Importer, Recipe, Reference
from hil.plugins import load_tensors, save_tensors


class Silent(BaseException):
    def __str__(self):
        raise ValueError("an error without a text")


def broken(place, name):
    """Whether this place misbehaves for a model of this name, and what it returns then."""
    where, _, how = Path(name).stem.partition("-")
    if where != place:
        return False, None
    if how == "raise":
        raise ValueError("boom")
    if how == "exit":
        sys.exit(7)
    if how == "silent":
        raise Silent
    return True, {"none": None, "wrong": 3}[how]


SPECS = (TensorSpec("x", "float32", (4,)),), (TensorSpec("y", "float32", (4,)),)


def compile_model(model, **order):
    is_broken, value = broken("compile", model.path.name)
    if is_broken:
        return value
    digests = {name: digest_file(path) for name, path in model.files.items()}
    return Artifact("acme", model.path.name, model.files, digests, "", "acme 1", inputs=SPECS[0], outputs=SPECS[1])


class Program:
    inputs, outputs = SPECS
    function = ""

    def __init__(self, main):
        self.main = main

    def bind(self, inputs):
        self.given = inputs

    def run(self):
        broken("run", self.main)

    def fetch(self):
        is_broken, value = broken("fetch", self.main)
        return value if is_broken else [np.maximum(self.given[0], 0)]


class Runtime:
    def __init__(self, options):
        pass

    @staticmethod
    def describe():
        return {"version": "1", "devices": ["acme"]}

    def prepare(self, device):
        pass

    def load(self, folder, main, device, function):
        is_broken, value = broken("load", main)
        return value if is_broken else Program(main)


def compute(model, inputs, outputs, **_):
    is_broken, value = broken("refer", model.path.name)
    if is_broken:
        return value
    save_tensors(outputs, {"y": np.maximum(load_tensors(inputs)["x"], 0)})


reference = Reference(("onnx", "odd"), lambda: "acme 1", compute)


def describe(path, function, dims):
    is_broken, value = broken("import", path)
    if is_broken:
        return value
    inputs, outputs = ([[spec.name, spec.dtype, list(spec.shape)] for spec in specs] for specs in SPECS)
    return {"function": "", "inputs": inputs, "outputs": outputs, "ranges": {}, "external": [], "producer": {}}


def reads(path, function):
    is_broken, value = broken("reads", path)
    return value if is_broken else ()


def recognises(head):
    sys.exit(7)


importer = Importer((".odd",), recognises, describe, reads)


def apply(model, output, external, samples):
    is_broken, value = broken("recipe", model)
    if is_broken:
        return value
    shutil.copy(model, output)


recipe = Recipe(apply)
flow = Flow("acme", "acme", recipe="acme", references=("acme",))


def connect(address, config):
    is_broken, value = broken("link", address.replace("usb:", "link-"))
    assert is_broken
    return value


class Lab:
    def connect(self, selector, **_):
        is_broken, value = broken("lab", f"lab-{selector}")
        assert is_broken
        return value

    def order(self, selector, purpose):
        return self.connect(selector)


def read(path, *, context):
    return broken("read", path.name)[1]


def write(bundle, path, *, context):
    broken("write", path.name)


form = Format(read, write, False, "a form that fails")


def lower(program, how):
    return broken("lower", f"lower-{how}")[1]


def quantizer(per_channel, is_dynamic, how):
    return broken("lower", f"lower-{how}")[1]


backend = ExecuTorchBackend(lower, quantizer, options={"how": ""})
'''


def install(site: Path) -> None:
    """Install the package acme 1.2 in a directory for ``sys.path``."""
    info = site / "acme-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(POINTS)
    (site / "acme.py").write_text(MODULE)


def save_relu(path: Path) -> Path:
    """Save relu(x) of 4 float32 values, as ONNX or with a different suffix."""
    value = (TensorProto.FLOAT, [4])
    # All models differ, because hil caches results by content.
    return save_model(path, [helper.make_node("Relu", ["x"], ["y"], path.stem)], [("x", *value)], [("y", *value)])
