"""Serve procrastinate as a rival: a worker process for the queues of N boards, and a client in this process.

``python farm_bare.py URL N`` reads orders from stdin and prints replies, one JSON document per line. ``{"op":
"latency", "count": K}`` -> list of seconds from deferring a job until its task starts, for K jobs in sequence.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time

import procrastinate

TASK = "bench"


def app_for(url: str) -> procrastinate.App:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url, min_size=2, max_size=4))

    @app.task(name=TASK)
    async def begin(number: int) -> None:
        print(json.dumps([number, time.monotonic_ns()]), flush=True)

    return app


async def work(url: str, boards: int, mark: str) -> None:
    """Run the worker, which listens to the queues of all boards."""
    app = app_for(url)
    async with app.open_async():
        print(json.dumps("ready"), flush=True)
        await app.run_worker_async(queues=[f"{mark}:{number}" for number in range(boards)], concurrency=boards)


async def serve(url: str, boards: int) -> None:
    """Start the worker, and execute orders."""
    mark = f"bare-{os.getpid()}"
    worker = subprocess.Popen([sys.executable, __file__, url, str(boards), mark], stdout=subprocess.PIPE, text=True)
    assert worker.stdout
    worker.stdout.readline()
    app = app_for(url)
    number = 0
    try:
        async with app.open_async():
            await asyncio.sleep(1.0)  # wait until the worker listens
            print(json.dumps("ready"), flush=True)
            while line := sys.stdin.readline():
                taken = []
                for _ in range(json.loads(line)["count"]):
                    number += 1
                    queue = f"{mark}:{number % boards}"
                    start = time.monotonic_ns()
                    await app.configure_task(TASK, queue=queue, lock=queue).defer_async(number=number)
                    said, began = json.loads(worker.stdout.readline())
                    assert said == number
                    taken.append((began - start) / 1e9)
                print(json.dumps(taken), flush=True)
    finally:
        worker.kill()
        worker.wait()


def main() -> None:
    """Serve orders, or run the worker."""
    logging.disable(logging.WARNING)  # suppress the warning that the app is in the main module
    url, boards = sys.argv[1], int(sys.argv[2])
    asyncio.run(work(url, boards, sys.argv[3]) if len(sys.argv) > 3 else serve(url, boards))


if __name__ == "__main__":
    main()
