"""The farm's protocol as Python sees it: stubs made from the proto's descriptor, for clients and for hosts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from hil.protocol import wire
from hil.protocol.v1 import farm_pb2 as pb

SERVICES = ("Farm", "Hosts", "Artifacts")
LEASE_KEY, LEASE_SECRET_KEY, DIAL_KEY = "hil-lease", "hil-lease-key", "hil-dial"


def methods(service: str) -> Iterable[tuple[str, str, str, Any, Any]]:
    """Of each method of a service: name, path, gRPC kind (``unary_stream``), and the messages of either side."""
    for method in pb.DESCRIPTOR.services_by_name[service].methods:
        streams = ["stream" if one else "unary" for one in (method.client_streaming, method.server_streaming)]
        asked, answered = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        yield method.name, f"/{wire.PACKAGE}.{service}/{method.name}", "_".join(streams), asked, answered


class FarmStub:
    """The gateway's methods over a channel, each under its name: ``stub.Submit(pb.SubmitRequest())``."""

    def __init__(self, channel: grpc.Channel) -> None:
        for service in SERVICES:
            for name, path, kind, asked, answered in methods(service):
                make = getattr(channel, kind)
                call = make(path, request_serializer=asked.SerializeToString, response_deserializer=answered.FromString)
                setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)
