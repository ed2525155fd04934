"""Calls of a client's agent over gRPC, each as a test has it: also those that hil's own client would never make."""

from __future__ import annotations

import grpc

from hil.controller.devices.agent_client.client import AgentClient
from hil.protocol import grpc_calls, wire


def channel_of(client: AgentClient) -> grpc.Channel:
    """The client's channel, which it closes itself."""
    return client._calls._over_grpc()._channel


def stub_of(client: AgentClient) -> grpc_calls.Stub:
    """The agent's methods."""
    return grpc_calls.Stub(channel_of(client))


def metadata_of(client: AgentClient) -> list[tuple[str, str]]:
    """What a call of the client's session says of itself."""
    return [(wire.SESSION_KEY, client._hold.token if client._hold else "")]
