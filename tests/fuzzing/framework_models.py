"""Fuzzers of the models that PyTorch and TensorFlow read, where these are installed."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzzing import mutate
from fuzzing.files import described, model_fuzzer


def _lacking(package: str) -> Callable[[], str]:
    import importlib.util

    return lambda: "" if importlib.util.find_spec(package) else f"{package} is not installed"


def _pt2() -> list[bytes]:
    """Programs that torch exported: numbers, a dynamic size, constants."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.layer(x)) * self.scale + x.shape[0]

    found = []
    for dims in (None, {"x": {0: torch.export.Dim("n", min=2, max=8)}}):
        held = io.BytesIO()
        torch.export.save(torch.export.export(Net(), (torch.ones(3, 4),), dynamic_shapes=dims), held)
        found.append(held.getvalue())
    return found


def _pt2_archive(data: bytes, rng: Random) -> bytes:
    """Change a part of an archive, and store it as torch does: without compression."""
    import zipfile

    if rng.random() < 0.15:
        return mutate.havoc(data, rng)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as held:
            members = [(one.filename, held.read(one)) for one in held.infolist()][:50]
    except Exception:  # damaged by an earlier change
        return mutate.havoc(data, rng)
    if not members:
        return mutate.havoc(data, rng)
    texts = [at for at, (name, _) in enumerate(members) if name.endswith(".json")]
    at = rng.choice(texts) if texts and rng.random() < 0.8 else rng.randrange(len(members))
    name, content = members[at]
    members[at] = (name, (mutate.json_bytes if content[:1] == b"{" else mutate.havoc)(content, rng))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as held:
        for name, content in members:
            held.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


def _read_pt2(path: Path) -> None:
    from hil.controller.models.importers.exported.pt2 import describe

    described(describe)(path)


def _graphs() -> list[bytes]:
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], "x")
        w = tf.compat.v1.get_variable("w", [4, 2], use_resource=True)
        tf.nn.relu(tf.matmul(x, w), name="y")
    return [bytes(graph.as_graph_def().SerializeToString())]


def _graph(data: bytes, rng: Random) -> bytes:
    import tensorflow as tf

    return mutate.of_message(tf.compat.v1.GraphDef)(data, rng)


def _keras() -> list[bytes]:
    import keras

    layers = [keras.Input((4,)), keras.layers.Dense(2, activation="relu"), keras.layers.Reshape((1, 2))]
    with tempfile.TemporaryDirectory() as place:
        keras.Sequential(layers).save(path := Path(place) / "a.keras")
        return [path.read_bytes()]


def _read_tensorflow(path: Path) -> None:
    from hil.controller.models.tensorflow.source import describe

    described(describe)(path)


FUZZERS = [
    model_fuzzer(
        "pt2",
        "programs of torch.export, .pt2",
        "a.pt2",
        _read_pt2,
        _pt2,
        _pt2_archive,
        limit_mib=1200,
        address_mib=0,
        lacking=_lacking("torch"),
    ),
    model_fuzzer(
        "graphdef",
        "TensorFlow's graphs, GraphDef",
        "a.pb",
        _read_tensorflow,
        _graphs,
        _graph,
        limit_mib=1200,
        address_mib=0,
        lacking=_lacking("tensorflow"),
    ),
    model_fuzzer(
        "keras",
        "models of Keras, .keras",
        "a.keras",
        _read_tensorflow,
        _keras,
        lambda data, rng: mutate.archive(data, rng, lambda one, rng: mutate.json_bytes(one, rng)),
        limit_mib=1200,
        address_mib=0,
        lacking=_lacking("tensorflow"),
    ),
]
