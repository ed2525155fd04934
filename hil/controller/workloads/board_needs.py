"""Board requirements of farm jobs other than the runtime: free memory, a writable disk, a loadable program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.workloads.board_checks import write_tiny_model
from hil.core.files import digest_file
from hil.core.text import TextSink
from hil.errors import BoardUnfit
from hil.formats.onnx_file import load_onnx

MIN_FREE_MEMORY_MIB, MIN_STORE_MIB = 32, 16
# Size of the weights in the check's model. Boards with less memory than the second value get a model without weights.
MODEL_MIB, _MODEL_MEMORY_MIB = 4, 128
_WRITTEN_BYTES = 64 << 10
_WAIT_SECONDS = 10.0


def check_needs(choice: BoardChoice, runtime: str, folder: Path, say: TextSink) -> bool:
    """Check a board's memory and disk, and write a new file to the board. Return whether a model with weights fits.

    Args:
        folder: an empty directory on this machine.

    Raises:
        BoardUnfit: the board lacks memory, or the disk is full or read-only.
        BoardError: the board does not respond or is in use.
    """
    from hil.controller.pipeline.boards.board_pool import BoardPool

    with BoardPool("farm check", wait_s=_WAIT_SECONDS, say=say, needs_device=False) as pool:
        board = pool.session(choice, runtimes=(runtime,)).board
        if lack := find_lack_of_memory(board.info):
            raise BoardUnfit(lack, board=choice.name, hint="stop other programs on the board")
        if lack := find_lack_of_disk(board.info):
            raise BoardUnfit(lack, board=choice.name, hint="remove files on the board, or set a different directory")
        # Use new content in every check, because the agent does not write blobs that it already has.
        file = folder / "written"
        file.write_bytes(os.urandom(_WRITTEN_BYTES))
        board.client.put({digest_file(file): (file, 0)})
        return _compute_memory_mib(board.info) >= _MODEL_MEMORY_MIB


def find_lack_of_memory(info: Mapping[str, Any]) -> str:
    """Return the problem with a board's free memory, or "" if none is known.

    Args:
        info: the board's description of itself.
    """
    free = next((one for one in info.get("readings", ()) if one["name"] == "free memory"), None)
    if free is None or float(free.get("value", 0.0)) >= MIN_FREE_MEMORY_MIB:
        return ""
    return f"{float(free.get('value', 0.0)):.0f} MiB of memory free, jobs require {MIN_FREE_MEMORY_MIB} MiB"


def find_lack_of_disk(info: Mapping[str, Any]) -> str:
    """Return the problem with the free space of a board's program store, or "" if none is known."""
    room_mib = int(info.get("store_room_bytes", MIN_STORE_MIB << 20)) / 2**20
    return f"store has {room_mib:.0f} MiB free, jobs require {MIN_STORE_MIB} MiB" if room_mib < MIN_STORE_MIB else ""


def _compute_memory_mib(info: Mapping[str, Any]) -> float:
    limit = int(info.get("memory_limit_bytes", 0)) or int(info.get("machine", {}).get("memory_bytes", 0))
    return limit / 2**20


def write_model(path: Path, *, weights: bool) -> None:
    """Write the model of a check.

    The model doubles the input. With ``weights`` the model also returns the largest products.
    """
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    model = load_onnx(write_tiny_model(path.parent))
    if weights:
        # Powers of 2 without sums are exact in any arithmetic, even one that the board does not declare.
        powers = np.array([-2, -1, -0.5, 0.5, 1, 2], np.float32)
        values = np.random.default_rng(0).choice(powers, (MODEL_MIB << 14, 16))
        graph = model.graph
        graph.initializer.append(numpy_helper.from_array(values, "weights"))
        graph.node.append(helper.make_node("Mul", ["x", "weights"], ["products"], "multiplied"))
        graph.node.append(helper.make_node("ReduceMax", ["products"], ["most"], "largest", keepdims=0, axes=[0]))
        graph.output.append(helper.make_tensor_value_info("most", onnx.TensorProto.FLOAT, [16]))
    onnx.save(model, path)
