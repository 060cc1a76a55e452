"""protos/neuronpipe/forward: its messages are those of neuronpipe.api.v1 on the wire, with bytes for what is only
forwarded.
"""

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from neuronpipe.api.forward.v1 import inference_pb2 as forward_inference
from neuronpipe.api.forward.v1 import stages_pb2 as forward_stages
from neuronpipe.api.v1 import inference_pb2, stages_pb2

_PAIRS = [
    (name, forwarded, api.message_types_by_name[name])
    for file, api in (
        (forward_inference.DESCRIPTOR, inference_pb2.DESCRIPTOR),
        (forward_stages.DESCRIPTOR, stages_pb2.DESCRIPTOR),
    )
    for name, forwarded in file.message_types_by_name.items()
]


def _kind(field: FieldDescriptor) -> tuple[object, ...]:
    """What a field is on the wire: messages are of their own type,
    or of the one of the same name in the other package."""
    message = field.message_type.full_name.replace(".forward.", ".api.") if field.message_type else ""
    enum = field.enum_type.full_name if field.enum_type else ""
    return field.number, field.name, field.is_repeated, field.type, message, enum, bool(field.containing_oneof)


@pytest.mark.parametrize(("name", "forwarded", "api"), _PAIRS, ids=[name for name, _, _ in _PAIRS])
def test_a_message_has_the_same_fields(name: str, forwarded: Descriptor, api: Descriptor) -> None:
    ours, theirs = ({field.number: field for field in descriptor.fields} for descriptor in (forwarded, api))
    assert ours.keys() == theirs.keys()
    for number, field in ours.items():
        if field.type == FieldDescriptor.TYPE_BYTES and theirs[number].type == FieldDescriptor.TYPE_MESSAGE:
            assert (field.name, field.is_repeated) == (theirs[number].name, theirs[number].is_repeated)
        else:
            assert _kind(field) == _kind(theirs[number])


@pytest.mark.parametrize("file", [forward_inference.DESCRIPTOR, forward_stages.DESCRIPTOR], ids=["inference", "stages"])
def test_no_rpc_is_defined_twice(file: FileDescriptor) -> None:
    assert not file.services_by_name
