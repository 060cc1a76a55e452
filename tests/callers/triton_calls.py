"""Calls a server with every form of tritonclient, in a process of its own: tritonclient.grpc has messages of the same
names as a gateway, and a process can have them once.

Run: python -m tests.callers.triton_calls GRPC HTTP < cases > answers  (both pickled)
"""

import asyncio
import pickle
import queue
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_LIMIT_S = 30


@dataclass(frozen=True)
class Case:
    """A request. `inputs`: arrays by name. Arrays of texts or bytes have the dtype object."""

    model: str
    inputs: dict[str, Any]
    parameters: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()

    @property
    def is_text(self) -> bool:
        return not any(isinstance(value, bytes) for array in self.inputs.values() for value in array.ravel())


# The result of a case: its outputs, or the error's status and message.
Answer = dict[str, Any] | tuple[str, str]
_DATATYPES = {"object": "BYTES", "int64": "INT64", "int32": "INT32", "uint8": "UINT8"}


def main(grpc_address: str, http_address: str) -> None:
    warnings.simplefilter("ignore")
    import tritonclient.grpc as over_grpc
    import tritonclient.grpc.aio as over_grpc_aio
    import tritonclient.http as over_http
    import tritonclient.http.aio as over_http_aio
    from tritonclient.utils import InferenceServerException

    cases: list[Case] = pickle.load(sys.stdin.buffer)

    def arguments(module: Any, case: Case, **options: Any) -> dict[str, Any]:
        inputs = []
        for name, array in case.inputs.items():
            inputs.append(module.InferInput(name, array.shape, _DATATYPES[array.dtype.name]))
            inputs[-1].set_data_from_numpy(array, **options)
        outputs = [module.InferRequestedOutput(name, **options) for name in case.outputs] or None
        return {
            "model_name": case.model,
            "inputs": inputs,
            "outputs": outputs,
            "request_id": "mine",
            "parameters": case.parameters,
        }

    def read(result: Any) -> Answer:
        response = result.get_response()
        is_http = isinstance(response, dict)
        names = [
            array["name"] if is_http else array.name for array in (response["outputs"] if is_http else response.outputs)
        ]
        assert (response["id"] if is_http else response.id) == "mine"
        return {name: result.as_numpy(name) for name in names}

    def told(error: Any) -> Answer:
        return (error.status() or "").removeprefix("StatusCode."), error.message()

    def each(infer: Callable[[Case], Any]) -> list[Answer]:
        answers: list[Answer] = []
        for case in cases:
            try:
                answers.append(read(infer(case)))
            except InferenceServerException as error:
                answers.append(told(error))
        return answers

    async def each_at_once(module: Any, address: str) -> list[Answer]:
        async with module.InferenceServerClient(address) as client:
            outcomes = await asyncio.gather(
                *(client.infer(**arguments(module, case)) for case in cases), return_exceptions=True
            )
        return [
            told(outcome) if isinstance(outcome, InferenceServerException) else read(outcome) for outcome in outcomes
        ]

    def by_callback(client: Any) -> list[Answer]:
        answers: list[Answer] = []
        ready: queue.Queue[Any] = queue.Queue()
        for case in cases:
            client.async_infer(callback=lambda result, error: ready.put((result, error)), **arguments(over_grpc, case))
            result, error = ready.get(timeout=_LIMIT_S)
            answers.append(told(error) if error else read(result))
        return answers

    def by_stream(client: Any) -> list[Answer]:
        """Sends the cases one after the other on one stream: the client's errors of a stream have no id."""
        ready: queue.Queue[Any] = queue.Queue()
        client.start_stream(callback=lambda result, error: ready.put((result, error)))
        answers: list[Answer] = []
        for case in cases:
            client.async_stream_infer(**arguments(over_grpc, case))
            result, error = ready.get(timeout=_LIMIT_S)
            answers.append(told(error) if error else read(result))
        client.stop_stream()
        return answers

    def said(client: Any) -> dict[str, Any]:
        """Returns the server's description of itself, in messages or in JSON."""

        def refused(call: Callable[[], Any]) -> Answer:
            try:
                call()
            except InferenceServerException as error:
                return told(error)
            raise AssertionError("was not refused")

        options = {} if client is http else {"as_json": True}
        return {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model ready": client.is_model_ready("minilm/raw", "1"),
            "server": client.get_server_metadata(**options),
            "metadata": client.get_model_metadata("minilm", **options),
            "config": client.get_model_config("minilm/raw", **options),
            "statistics": client.get_inference_statistics("minilm", "1", **options),
            "index": client.get_model_repository_index(**options),
            "load": refused(lambda: client.load_model("minilm")),
            "unload": refused(lambda: client.unload_model("minilm")),
            "shared memory": refused(client.get_system_shared_memory_status),
        }

    grpc, http = over_grpc.InferenceServerClient(grpc_address), over_http.InferenceServerClient(http_address)
    packed = {"request_compression_algorithm": "gzip", "response_compression_algorithm": "gzip"}
    answers: dict[str, Any] = {
        "grpc": each(lambda case: grpc.infer(**arguments(over_grpc, case))),
        "grpc, gzip": each(lambda case: grpc.infer(compression_algorithm="gzip", **arguments(over_grpc, case))),
        "grpc.aio": asyncio.run(each_at_once(over_grpc_aio, grpc_address)),
        "grpc, async_infer": by_callback(grpc),
        "grpc, stream": by_stream(grpc),
        "http": each(lambda case: http.infer(**arguments(over_http, case))),
        "http, gzip": each(lambda case: http.infer(**arguments(over_http, case), **packed)),
        "http, deflate": each(
            lambda case: http.infer(**arguments(over_http, case), request_compression_algorithm="deflate")
        ),
        # Bytes that are no text have no place in JSON.
        "http, JSON": each(lambda case: http.infer(**arguments(over_http, case, binary_data=not case.is_text))),
        "http.aio": asyncio.run(each_at_once(over_http_aio, http_address)),
        "said over grpc": said(grpc),
        "said over http": said(http),
    }
    pickle.dump(answers, sys.stdout.buffer)


if __name__ == "__main__":
    main(*sys.argv[1:])
