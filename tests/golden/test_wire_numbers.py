"""Field numbers of Ozone's envelope, as its own servers and clients use them: both our
ends could be wrong alike.
"""

import pytest

from protos.ozone_datanode_pb2 import (
    ContainerCommandRequestProto,
    ContainerCommandResponseProto,
    Echo,
    GetBlock,
    GetContainerChecksumInfo,
    ListBlock,
    ReadChunk,
)

REQUEST = {
    "getBlock": 13,
    "listBlock": 15,
    "readChunk": 16,
    "encodedToken": 23,
    "version": 24,
    "echo": 26,
}
RESPONSE = {
    "getBlock": 12,
    "listBlock": 14,
    "readChunk": 16,
    "echo": 23,
    "getContainerChecksumInfo": 24,
}


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        (ContainerCommandRequestProto, REQUEST | {"getContainerChecksumInfo": 27}),
        (ContainerCommandResponseProto, RESPONSE | {"result": 3, "message": 4}),
    ],
)
def test_commands_travel_under_ozones_field_numbers(message: type, numbers: dict[str, int]) -> None:
    fields = message.DESCRIPTOR.fields_by_name
    assert {name: fields[name].number for name in numbers} == numbers


def test_commands_have_ozones_type_numbers() -> None:
    assert (GetBlock, ListBlock, ReadChunk, Echo, GetContainerChecksumInfo) == (7, 9, 10, 22, 23)
