"""LitServe with batching."""

import signal

import litserve

from tests.bench.peers.classifier import load_classifier
from tests.bench.peers.launching import end_with_parent, read_settings, say_ready_when_healthy
from tests.servers.ports import free_port


class ClassifierAPI(litserve.LitAPI):
    """POST /predict {"text"} → {"label", "score"}."""

    def __init__(self, source: str, threads: int, max_batch_size: int, batch_timeout_s: float) -> None:
        super().__init__(max_batch_size=max_batch_size, batch_timeout=batch_timeout_s)
        self._source, self._threads = source, threads

    def setup(self, device: str) -> None:
        self._classifier = load_classifier(self._source, self._threads)

    def decode_request(self, request: dict[str, str]) -> str:
        return request["text"]

    def predict(self, texts: list[str] | str) -> list[tuple[str, float]]:
        return self._classifier([texts] if isinstance(texts, str) else texts)

    def encode_response(self, output: tuple[str, float]) -> dict[str, str | float]:
        label, score = output
        return {"label": label, "score": score}


def main() -> None:
    """Serves until SIGTERM."""
    # Chosen from single 3 s runs on 2 shared cores (2026-11-21), too noisy to rank close settings: 8 callers got 90
    # and, later, 52 texts/s from two workers of one thread, 69 from one of two; one caller 46 and 39 against 49. Batch
    # size and timeout were not ranked. Two threads of a batch wait for each other, and fall to a fifth or less where
    # something else takes a core.
    settings = read_settings(threads=1, workers=2, max_batch_size=32, batch_timeout_ms=1, fast_queue=1)
    # LitServe ends its workers on Ctrl-C only.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_with_parent()
    api = ClassifierAPI(settings.source, settings.threads, settings.max_batch_size, settings.batch_timeout_ms / 1e3)
    server = litserve.LitServer(
        api, accelerator="cpu", workers_per_device=settings.workers, fast_queue=bool(settings.fast_queue)
    )
    port = free_port()
    say_ready_when_healthy(port)
    server.run(
        host="127.0.0.1",
        port=port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
