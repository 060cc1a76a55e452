"""rpc/client.py: how a key is shown, and where it must not go in plain text."""

import logging

import pytest

from neuronpipe.rpc.client import key_metadata


@pytest.mark.parametrize(
    ("target", "is_encrypted", "warns"),
    [
        ("gateway.example:50050", False, True),
        ("dns:///gateway.example:50050", False, True),
        ("127.0.0.1:50050,10.0.0.1:50050", False, True),
        ("gateway.example:50050", True, False),
        ("127.0.0.1:50050", False, False),
        ("localhost", False, False),
        ("dns:///[::1]:50050", False, False),
        ("unix:/run/gateway.sock", False, False),
    ],
)
def test_a_key_in_plain_text_to_another_machine_is_warned_of(
    target: str, is_encrypted: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert key_metadata("np_key", target=target, is_encrypted=is_encrypted) == [("authorization", "Bearer np_key")]
    assert bool(caplog.records) is warns
    assert "np_key" not in str([vars(record) for record in caplog.records])


def test_nothing_is_warned_of_where_there_is_no_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not key_metadata("", target="gateway.example:50050", is_encrypted=False)
    assert not caplog.records
