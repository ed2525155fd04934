"""The values that the pipeline hands from stage to stage before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.core.tensors import TensorSpec


@dataclass(frozen=True)
class Model:
    """A model as it was read: what stage *import* makes.

    Attributes:
        name: short name, from the file's.
        format: ``onnx``, ``mlir`` or ``vmfb`` (already compiled).
        path: the file itself.
        files: every file that belongs to it, name in the program's folder -> path (the model and its external data).
        digest: of all those files together, ``blake3:...``.
        function: entry point ("" is the model's only one).
        inputs, outputs: specs in order; None where only the board can tell (``vmfb``).
        ranges: input name -> (low, high) where the model itself bounds its input's values.
        dims: the values the user gave to symbolic dimensions.
        producer: what wrote the model, opset versions and the like; for the record. ``unseen_state`` names what it
            keeps from run to run and does not return.
        cached: whether what is known of it came out of the cache.
    """

    name: str
    format: str
    path: Path
    files: Mapping[str, Path]
    digest: str
    function: str = ""
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    producer: Mapping[str, Any] = field(default_factory=dict)
    cached: bool = False

    @property
    def unseen(self) -> str:
        """What a comparison of its outputs says nothing about, for people; "" where it keeps no state."""
        state = ", ".join(self.producer.get("unseen_state", ()))
        return state and f"it keeps state from run to run ({state}): what no output shows of that was not compared"


@dataclass(frozen=True)
class Artifact:
    """A program that a runtime can load and how it was made: what stage *compile* makes.

    Attributes:
        runtime: the runtime it is for: ``iree`` or ``onnxruntime``.
        main: name of the file that the runtime opens.
        files: every file of the program, name -> path.
        digests: name -> digest of that file.
        function: entry point to call.
        compiler: name and version, ``none`` where nothing was compiled.
        flags: the compiler's flags, target included.
        inputs, outputs: specs where known; the loaded program's own are the truth.
        cached: whether it came out of the cache.
        seconds: how long compiling took (0 when cached).
        log: the compiler's log, or None.
        notes: what the compiler tells of its work, anything that JSON can say; ``text``, a line for people.
    """

    runtime: str
    main: str
    files: Mapping[str, Path]
    digests: Mapping[str, str]
    function: str
    compiler: str
    flags: tuple[str, ...] = ()
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    cached: bool = False
    seconds: float = 0.0
    log: Path | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
