"""Measure the transfer of large data over SSH: a file to the board's disk, and tensors to and from its memory."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import common
from benchmarks.ssh_layers import DEVICE
from benchmarks.ssh_rivals import FOLDER, GCM, BareTunnel, Rival
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.choosing.board_factory import open_board
from hil.controller.devices.deploy.ensure import AgentRecipe, ensure_agent
from hil.controller.devices.ssh.connect import open_shell
from hil.controller.devices.ssh.tunnel import open_tunnel
from hil.core.files import digest_file
from hil.core.results import Artifact
from tools.virtual_board import VirtualBoard

FILE_BYTES = 200_000_000
SIZE = 128 << 20
COUNT = SIZE // 4
TAKE = f"""
func.func @main(%x: tensor<{COUNT}xf32>) -> tensor<1xf32> {{
  %y = tensor.extract_slice %x[{COUNT - 1}] [1] [1] : tensor<{COUNT}xf32> to tensor<1xf32>
  return %y : tensor<1xf32>
}}
"""
GIVE = f"""
func.func @main(%x: tensor<1xf32>) -> tensor<{COUNT}xf32> {{
  %zero = arith.constant 0 : index
  %value = tensor.extract %x[%zero] : tensor<1xf32>
  %empty = tensor.empty() : tensor<{COUNT}xf32>
  %y = linalg.fill ins(%value : f32) outs(%empty : tensor<{COUNT}xf32>) -> tensor<{COUNT}xf32>
  return %y : tensor<{COUNT}xf32>
}}
"""


def bulk_rows(board: VirtualBoard, choice: BoardChoice, folder: Path, rounds: int) -> list[common.Row]:
    """Return all rows."""
    return [*file_rows(board, choice, folder, rounds), *tensor_rows(board, choice, folder, rounds)]


def file_rows(board: VirtualBoard, choice: BoardChoice, folder: Path, rounds: int) -> list[common.Row]:
    """Return rows for a file that is new to the board.

    hil hashes it here and verifies it there; the rival scp does not.
    """
    file = folder / "big.bin"
    rival = Rival(board, folder)
    content = bytearray(os.urandom(FILE_BYTES))

    def change() -> None:
        content[:8] = os.urandom(8)
        file.write_bytes(content)

    def forget() -> None:
        board.run(["find", "/root/.hil/store", FOLDER, "-type", "f", "-size", "+100000k", "-delete"], check=True)

    def hil() -> list[float]:
        change()
        begin = time.perf_counter()
        pushed = opened.push(Artifact("iree", file.name, {file.name: file}, {file.name: digest_file(file)}, "", "none"))
        taken = time.perf_counter() - begin
        assert pushed == FILE_BYTES
        forget()
        return [taken]

    def scp(*cipher: str) -> list[float]:
        change()
        with rival.master(*cipher) as through:
            begin = time.perf_counter()
            rival.scp([str(file)], f"{rival.address}:{FOLDER}/", through)
            taken = time.perf_counter() - begin
        forget()
        return [taken]

    with open_board(replace(choice, purpose="benchmark")) as opened:
        opened.take()
        got = common.interleave({"hil": hil, "scp": scp, "gcm": lambda: scp(*GCM)}, rounds)
    speed = {name: [FILE_BYTES / 1e6 / one for one in seconds] for name, seconds in got.items()}
    case = "200 MB to the board's disk"
    return [
        common.beside(case, speed["hil"], "scp, open master", speed["scp"], 1, "MB/s", ">= 1.0"),
        common.beside(case, speed["hil"], "scp, open master, gcm", speed["gcm"], 1, "MB/s", ">= 1.0"),
    ]


def tensor_rows(board: VirtualBoard, choice: BoardChoice, folder: Path, rounds: int) -> list[common.Row]:
    """Return rows for tensors through the tunnel, without the program's time, relative to a plain socket."""
    programs = {}
    for name, text in (("take", TAKE), ("give", GIVE)):
        (folder / f"{name}.mlir").write_text(text)
        programs[name] = common.compile_mlir(folder / f"{name}.mlir")
    data = np.random.default_rng(0).random(COUNT, dtype=np.float32)
    into = np.zeros(COUNT, np.float32)
    turn = 0
    shell = open_shell(choice.address, choice.config.connection, board=board.name, base=folder)
    place = ensure_agent(shell, AgentRecipe.of(["iree"]), folder="", board=board.name, say=print)
    bare = BareTunnel(board, folder, SIZE)
    rows = []

    def there() -> list[float]:
        begin = time.perf_counter()
        done = client.invoke(take.program_id, {take.inputs[0].name: data})
        taken = time.perf_counter() - begin - common.busy_ns(done) / 1e9
        assert next(iter(done.outputs.values()))[0] == data[-1]
        return [taken]

    def back() -> list[float]:
        nonlocal turn
        turn += 1
        begin = time.perf_counter()
        x = {give.inputs[0].name: np.array([turn], np.float32)}
        done = client.invoke(give.program_id, x, into={give.outputs[0].name: into})
        taken = time.perf_counter() - begin - common.busy_ns(done) / 1e9
        assert into[0] == into[-1] == turn
        return [taken]

    tunnel = open_tunnel(shell, place.socket)
    client = AgentClient(AgentEndpoint(tunnel.address), board.name)
    client.describe()
    client.open_session("benchmark", on_wait=lambda said: None)
    take, give = (common.load(client, programs[name], device=DEVICE) for name in ("take", "give"))
    cases = {
        "bare there": lambda: [bare.there(memoryview(data).cast("B"))],
        "there": there,
        "bare back": lambda: [bare.back(memoryview(into).cast("B"))],
        "back": back,
    }
    got = common.interleave(cases, rounds)
    client.close()
    tunnel.close()
    speed = {name: [SIZE / 1e6 / one for one in seconds] for name, seconds in got.items()}
    for way, name in (("to", "there"), ("from", "back")):
        case = f"gRPC, 128 MiB {way} the board, through the tunnel"
        rows.append(common.beside(case, speed[name], "bare ssh -L, gcm", speed[f"bare {name}"], 1, "MB/s", ">= 0.8"))
    bare.close()
    shell.close()
    return rows
