"""A caller with TEI's published proto, as tei-client has it generated. A process of its own, as protobuf keeps one
definition of a name.

Run: python -m tests.callers.tei TARGET < QUESTIONS
A question is a line {"rpc": "Embed/Embed", "messages": [{…}], "metadata": {…}}; its answer is a line with the messages
that came, and with the status of an error.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from tei_client.stubs import tei_pb2, tei_pb2_grpc


def answer(channel: grpc.Channel, question: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer to one question."""
    service, _, name = question["rpc"].partition("/")
    method = tei_pb2.DESCRIPTOR.services_by_name[service].methods_by_name[name]
    kind = GetMessageClass(method.input_type)
    messages = [ParseDict(message, kind()) for message in question["messages"]]
    call = getattr(getattr(tei_pb2_grpc, f"{service}Stub")(channel), name)
    metadata = tuple(question.get("metadata", {}).items())

    def sent() -> Iterator[Any]:
        yield from messages

    received: list[Any] = []
    status: dict[str, Any] = {}
    try:
        given = sent() if method.client_streaming else messages[0]
        found = call(given, metadata=metadata, timeout=60)
        if method.server_streaming:
            received.extend(found)
        else:
            received.append(found)
    except grpc.RpcError as error:
        status = {"code": error.code().name, "details": error.details()}
    return {"messages": [MessageToDict(message, preserving_proto_field_name=True) for message in received], **status}


if __name__ == "__main__":
    with grpc.insecure_channel(sys.argv[1]) as channel:
        for line in sys.stdin:
            print(json.dumps(answer(channel, json.loads(line))), flush=True)
