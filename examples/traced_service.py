"""A FastAPI service beside the gateway that joins its callers' traces.

GET /sentiment?text=…  →  {"label": "…", "score": 0.97}

It forwards the W3C header `traceparent`, and `tracestate`, as gRPC metadata, so the gateway's spans are children of the
caller's. A service with spans of its own takes OpenTelemetry's instrumentation of FastAPI and of gRPC, which does the
same.

Usage: python traced_service.py [--target HOST:PORT] [--model NAME] [--port 8080]
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import uvicorn
from fastapi import FastAPI, HTTPException, Request

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput

_TIMEOUT_S = 5.0
# gRPC's codes → HTTP's, for what callers can do something about.
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


def make_app(target: str, model: str) -> FastAPI:
    """The service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with grpc.aio.insecure_channel(target) as channel:
            app.state.stub = InferenceServiceStub(channel)
            yield

    app = FastAPI(title="sentiment", lifespan=lifespan)

    @app.get("/sentiment")
    async def sentiment(text: str, request: Request) -> dict[str, str | float]:
        trace = [(name, value) for name in ("traceparent", "tracestate") if (value := request.headers.get(name))]
        message = InferRequest(model=model, input=TaskInput(text_classification=TextClassificationInput(text=text)))
        try:
            response = await app.state.stub.Infer(message, timeout=_TIMEOUT_S, metadata=trace)
        except grpc.aio.AioRpcError as error:
            raise HTTPException(_STATUS.get(error.code(), 502), error.details()) from error
        best = response.result.text_classification.labels[0]
        return {"label": best.label, "score": best.score}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50050")
    parser.add_argument("--model", default="sentiment")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    uvicorn.run(make_app(options.target, options.model), host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
