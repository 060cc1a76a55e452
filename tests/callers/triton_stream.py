"""Reads a text as it comes with tritonclient, in a process of its own (see triton_calls.py).

Run: python -m tests.callers.triton_stream GRPC MODEL PROMPT PARAMETERS    (in JSON; prints the responses as JSON)
"""

import json
import queue
import sys
from typing import Any

_LIMIT_S = 60


def main(address: str, model: str, prompt: str, parameters: str) -> None:
    import numpy as np
    import tritonclient.grpc as triton

    answers: queue.Queue[Any] = queue.Queue()
    given = triton.InferInput("prompt", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[prompt]], object))
    responses: list[dict[str, Any]] = []
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, [given], request_id="mine", parameters=json.loads(parameters))
        is_last = False
        while not is_last:
            result, error = answers.get(timeout=_LIMIT_S)
            if error:
                responses.append({"error": error.message()})
                break
            response = result.get_response()
            is_last = response.parameters["triton_final_response"].bool_param
            text = b"".join(result.as_numpy("text").ravel().tolist()).decode()
            ids = result.as_numpy("token_ids").ravel().tolist()
            reason = int(result.as_numpy("finish_reason").ravel()[0])
            tensors = {name: result.as_numpy(name).tolist() for name in ("text", "logprobs", "top_token_ids")}
            tensors["text"] = [[text.decode() for text in row] for row in tensors["text"]]
            responses.append({"id": response.id, "text": text, "token_ids": ids, "reason": reason, "tensors": tensors})
        is_decoupled = client.get_model_config(model).config.model_transaction_policy.decoupled
        client.stop_stream()
    print(json.dumps({"responses": responses, "is_decoupled": is_decoupled}))


if __name__ == "__main__":
    main(*sys.argv[1:])
