"""Serve labgrid as a rival in a separate environment: the coordinator in a process, and a client in this process.

Reads orders from stdin and prints replies, one JSON document per line. ``{"op": "places", "count": N}`` creates up to N
places. ``{"op": "acquire", "count": N}`` -> N times the seconds from reserving any place until it is acquired.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from labgrid.remote.client import start_session
from labgrid.remote.common import Reservation, ReservationState
from labgrid.remote.generated import labgrid_coordinator_pb2 as pb

TAG = {"board": "bench"}
POLL_S = 0.005  # labgrid-client itself polls once per second


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(address: str) -> None:
    host, port = address.split(":")
    deadline = time.monotonic() + 30
    while socket.socket().connect_ex((host, int(port))):
        if time.monotonic() > deadline:
            raise TimeoutError("labgrid-coordinator did not start")
        time.sleep(0.1)


async def make_places(stub: Any, have: int, count: int) -> None:
    for number in range(have, count):
        await stub.AddPlace(pb.AddPlaceRequest(name=f"place-{number}"))
        await stub.SetPlaceTags(pb.SetPlaceTagsRequest(placename=f"place-{number}", tags=TAG))


async def acquire(stub: Any) -> float:
    """Reserve any place, wait for the allocation, and acquire the place. Return the seconds, and release the place."""
    start = time.perf_counter()
    filters = {"main": pb.Reservation.Filter(filter=TAG)}
    said = await stub.CreateReservation(pb.CreateReservationRequest(filters=filters, prio=0.0))
    reservation = Reservation.from_pb2(said.reservation)
    while reservation.state is ReservationState.waiting:
        await asyncio.sleep(POLL_S)
        said = await stub.PollReservation(pb.PollReservationRequest(token=reservation.token))
        reservation = Reservation.from_pb2(said.reservation)
    place = reservation.allocations["main"][0]
    await stub.AcquirePlace(pb.AcquirePlaceRequest(placename=place))
    taken = time.perf_counter() - start
    await stub.ReleasePlace(pb.ReleasePlaceRequest(placename=place))
    await stub.CancelReservation(pb.CancelReservationRequest(token=reservation.token))
    return taken


def main() -> None:
    """Serve orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of labgrid must not look like a reply
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(sys.executable).with_name("labgrid-coordinator")
        coordinator = subprocess.Popen(
            [str(program), "-l", address], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
            wait_for(address)
            session = start_session(address, loop=loop)
            have = 0
            print(json.dumps("ready"), file=answers, flush=True)
            for line in sys.stdin:
                order = json.loads(line)
                answer: Any = None
                if order["op"] == "places":
                    loop.run_until_complete(make_places(session.stub, have, order["count"]))
                    answer = have = max(have, order["count"])
                else:
                    answer = [loop.run_until_complete(acquire(session.stub)) for _ in range(order["count"])]
                print(json.dumps(answer), file=answers, flush=True)
            loop.run_until_complete(session.stop())
            loop.run_until_complete(session.close())
        finally:
            coordinator.kill()
            coordinator.wait()


if __name__ == "__main__":
    main()
