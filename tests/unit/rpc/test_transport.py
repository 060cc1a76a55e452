"""rpc/transport.py: the ends of calls."""

import re

import pytest

from neuronpipe.rpc.transport import end_of


def test_a_fault_before_a_request_has_an_id_is_found_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    found = re.search(r"under request_id '(\w+)'$", end_of(ZeroDivisionError()).message)
    (record,) = caplog.records
    assert found
    assert record.__dict__["fields"]["request_id"] == found[1]
