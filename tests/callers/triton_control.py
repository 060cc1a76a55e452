"""Loads and unloads a model with tritonclient, in a process of its own as in triton_calls.

Run: python -m tests.callers.triton_control GRPC HTTP MODEL [KEY] > what it was told, as JSON
"""

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any


def main(grpc_address: str, http_address: str, model: str, key: str = "") -> None:
    warnings.simplefilter("ignore")
    import numpy as np
    import tritonclient.grpc as over_grpc
    import tritonclient.http as over_http
    from tritonclient.utils import InferenceServerException

    headers = {"authorization": f"Bearer {key}"} if key else {}

    def told(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, headers=headers, **options)
        except InferenceServerException as error:
            return [(error.status() or "").removeprefix("StatusCode."), error.message()]

    def story(module: Any, client: Any) -> dict[str, Any]:
        as_json = {} if client is http else {"as_json": True}

        def index() -> list[list[str]]:
            rows = told(client.get_model_repository_index, **as_json)
            rows = rows.get("models", []) if isinstance(rows, dict) else rows
            if rows and not isinstance(rows[0], dict):  # an error
                return []
            return [[row["name"], row["version"], row["state"], row.get("reason", "")] for row in rows]

        def infer() -> Any:
            text = module.InferInput("text", [1, 1], "BYTES")
            text.set_data_from_numpy(np.array([["A fine day."]], object))
            result = told(client.infer, model, [text])
            if isinstance(result, list):
                return result
            answer = result.get_response()
            return answer["model_version"] if client is http else answer.model_version

        seen: dict[str, Any] = {"server": told(client.get_server_metadata, **as_json)}
        for verb, change in (("unload", client.unload_model), ("load", client.load_model)):
            seen[verb] = told(change, model)
            seen[f"{verb}: ready"] = told(client.is_model_ready, model)
            seen[f"{verb}: infer"] = infer()
            seen[f"{verb}: index"] = index()
        seen["load with a configuration"] = told(client.load_model, model, config="{}")
        seen["unknown"] = told(client.load_model, "unknown")
        return seen

    grpc, http = over_grpc.InferenceServerClient(grpc_address), over_http.InferenceServerClient(http_address)
    json.dump({"grpc": story(over_grpc, grpc), "http": story(over_http, http)}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
