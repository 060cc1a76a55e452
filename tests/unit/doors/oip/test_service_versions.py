"""doors/oip/service.py: requests for models whose versions share them."""

from typing import NoReturn

import pytest

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import ModelNotFound
from neuronpipe.core.names import Spans
from neuronpipe.doors.oip.service import RowSpans, TensorRequest, TensorService

_SPANS = RowSpans(Spans.REQUEST, Spans.INFER_BATCH)


class _Models:
    """A table that tells the key by which it was asked."""

    def find(self, name: str, version: str, key: str = "") -> NoReturn:
        raise ModelNotFound(f"asked for by {key!r}")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> TensorService:
    monkeypatch.setattr(TensorService, "_models", _Models())
    return TensorService.__new__(TensorService)


@pytest.mark.parametrize(("call", "key"), [(Call("x", route_key="a key"), "a key"), (Call("x"), "of the request")])
async def test_the_key_of_a_request_chooses_its_version_whether_it_streams_or_not(
    service: TensorService, call: Call, key: str
) -> None:
    request = TensorRequest("m", "", "of the request", {}, [])
    with pytest.raises(ModelNotFound, match=f"'{key}'"):
        await service.infer(request, call, _SPANS)
    with pytest.raises(ModelNotFound, match=f"'{key}'"):
        await anext(service.stream(request, call, _SPANS))
