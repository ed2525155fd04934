"""A receiver of webhooks on loopback."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ReceivedMessage:
    """A request that the receiver got."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)


@dataclass
class WebhookReceiver:
    """Messages in the order of arrival, and the prepared responses: status and headers. The default is 200."""

    url: str = ""
    messages: list[ReceivedMessage] = field(default_factory=list)
    responses: list[tuple[int, dict[str, str]]] = field(default_factory=list)

    def respond(self, *statuses: int, headers: dict[str, str] | None = None) -> None:
        """Set the responses of the next requests."""
        self.responses += [(status, headers or {}) for status in statuses]

    def list_events(self) -> Sequence[str]:
        """Return the events of the messages."""
        return [message.headers.get("x-hil-event", "") for message in self.messages]


@contextlib.contextmanager
def receive_webhooks() -> Iterator[WebhookReceiver]:
    """Serve a receiver of webhooks."""
    receiver = WebhookReceiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.messages.append(ReceivedMessage(self.path, headers, body))
            status, answer = receiver.responses.pop(0) if receiver.responses else (200, {})
            self.send_response(status)
            for name, value in answer.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
