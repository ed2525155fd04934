"""gRPC clients and servers of the agent's protocol for tests, also for calls that hil's own client never makes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc

from hil.agent.calls import Calls
from hil.agent.grpc_server import CallInterceptor
from hil.controller.devices.agent_client.client import AgentClient
from hil.protocol import grpc_calls, wire
from hil.protocol.data_connection import METHODS


class Stub:
    """Client stub with the agent's methods as attributes: ``stub.Describe(pb.DescribeRequest())``."""

    def __init__(self, channel: Any) -> None:
        for method in METHODS.values():
            decode = partial(grpc_calls.decode, method.reply)
            codec = {"request_serializer": grpc_calls.encode, "response_deserializer": decode}
            setattr(self, method.name, getattr(channel, method.kind)(method.path, **codec))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def serve_all(servicers: Mapping[str, object]) -> grpc.ServerInterceptor:
    """Return a server interceptor that serves any number of calls. ``servicers``: service name -> handler."""
    admit_all: Any = SimpleNamespace(admit_call=lambda *arguments: contextlib.nullcontext(arguments[2]))
    return CallInterceptor(Calls(admit_all, servicers, ""))


def channel_of(client: AgentClient) -> grpc.Channel:
    """Return the client's channel. The client closes it."""
    return client._calls._open_grpc()._channel


def stub_of(client: AgentClient) -> Stub:
    """Return a stub on the client's channel."""
    return Stub(channel_of(client))


def metadata_of(client: AgentClient) -> list[tuple[str, str]]:
    """Return the metadata of the client's session."""
    return [(wire.SESSION_KEY, client._hold.token if client._hold else "")]
