"""Traces from containers: complete at the receiver, whichever container did the work."""

import json
import urllib.request
from functools import partial
from typing import Any

from tests.callers.requests import classify
from tests.callers.traced import PARENTS, TREE, ask_sampled
from tests.e2e.stack import Stack, wait_until

_SPANS_OF_A_REQUEST = sum(map(len, TREE.values()))


def _spans(stack: Stack, trace_id: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{stack.url('jaeger')}/{trace_id}") as response:
        spans: list[dict[str, Any]] = json.load(response)
    return spans


async def test_every_sampled_request_has_all_its_spans_and_its_batch(stack: Stack) -> None:
    answered = await ask_sampled(stack.target, [classify(f"text {number}") for number in range(40)])
    for call in answered:
        spans = wait_until("all spans", partial(_all_spans, stack, call.trace_id), 30)
        assert {service: sorted(span["name"] for span in spans if span["service"] == service) for service in TREE} == {
            service: sorted(names) for service, names in TREE.items()
        }
        by_name = {span["name"]: span for span in spans}
        assert {name: by_name[name]["parent_id"] for name in PARENTS} == {
            name: by_name[parent]["span_id"] for name, parent in PARENTS.items()
        }
        batches = [(link[0], link[1]) for span in spans for link in span["links"]]
        assert batches
        for trace_id, span_id in batches:
            wait_until("its batch", partial(_has_span, stack, trace_id, span_id), 30)


def _has_span(stack: Stack, trace_id: str, span_id: str) -> bool:
    return span_id in {span["span_id"] for span in _spans(stack, trace_id)}


def _all_spans(stack: Stack, trace_id: str) -> list[dict[str, Any]]:
    spans = _spans(stack, trace_id)
    return spans if len(spans) >= _SPANS_OF_A_REQUEST else []
