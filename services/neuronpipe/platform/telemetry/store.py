"""Keeps the last traces of a development server in memory, for `neuronpipe trace`."""

from collections import OrderedDict

from neuronpipe.core.tracing import Clock, Span
from neuronpipe.platform.telemetry.otlp_json import Json, to_otlp_json

# Maximum for one trace. A trace has about ten, but a caller may send any number of requests in one.
_MAX_SPANS = 1024


class TraceStore:
    """Keeps a number of traces. The oldest is dropped when another one begins. A batch is a trace of its own."""

    def __init__(self, max_traces: int, service: str, clock: Clock) -> None:
        self._max_traces, self._service, self._clock = max_traces, service, clock
        self._traces: OrderedDict[int, list[Span]] = OrderedDict()

    def add(self, span: Span) -> None:
        """Keeps a span."""
        spans = self._traces.setdefault(span.context.trace_id, [])
        if len(spans) < _MAX_SPANS:
            spans.append(span)
        if len(self._traces) > self._max_traces:
            self._traces.popitem(last=False)

    def find(self, trace_id: int) -> Json:
        """A trace's spans of this process and the batches that they ran in, as OTLP JSON; of an unknown trace none."""
        spans = list(self._traces.get(trace_id, ()))
        linked = dict.fromkeys(link.context.trace_id for span in spans for link in span.links)
        batches = [span for other in linked if other != trace_id for span in self._traces.get(other, ())]
        return to_otlp_json([*spans, *batches], {"service.name": self._service}, self._clock)
