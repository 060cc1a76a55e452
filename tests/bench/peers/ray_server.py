"""Ray Serve with @serve.batch: one local node that is started and ended here."""

import shutil
import signal
import tempfile

import ray
from ray import serve
from starlette.requests import Request

from tests.bench.peers.classifier import load_classifier
from tests.bench.peers.launching import end_with_parent, read_settings, say_ready
from tests.servers.ports import free_port

_OBJECT_STORE_BYTES = 80 << 20


class ClassifierDeployment:
    """POST / {"text"} → {"label", "score"}."""

    def __init__(self, source: str, threads: int, max_batch_size: int, batch_timeout_s: float) -> None:
        self._classifier = load_classifier(source, threads)
        self.classify.set_max_batch_size(max_batch_size)
        self.classify.set_batch_wait_timeout_s(batch_timeout_s)

    @serve.batch  # type: ignore[untyped-decorator]  # ray has no types here
    async def classify(self, texts: list[str]) -> list[tuple[str, float]]:
        return self._classifier(texts)

    async def __call__(self, request: Request) -> dict[str, str | float]:
        label, score = await self.classify((await request.json())["text"])
        return {"label": label, "score": score}


def main() -> None:
    """Serves until SIGTERM."""
    # Chosen from single 3 s runs on 2 shared cores (2026-11-21), too noisy to rank close settings: 8 callers got 64 and
    # 60 texts/s from two replicas of one thread, 53 from one of two; one caller 34 and 29 against 36. Batch size and
    # timeout were not ranked. Two threads of a batch wait for each other, and fall to a fifth or less where something
    # else takes a core.
    settings = read_settings(threads=1, workers=2, max_batch_size=32, batch_timeout_ms=1)
    end_with_parent()
    # Sockets are made in this folder, and their paths may have 107 bytes.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    signals = {signal.SIGTERM, signal.SIGINT}
    try:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
        )
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        options = {"num_replicas": settings.workers, "max_ongoing_requests": 256, "ray_actor_options": {"num_cpus": 0}}
        deployment = serve.deployment(**options)(ClassifierDeployment)
        serve.run(
            deployment.bind(settings.source, settings.threads, settings.max_batch_size, settings.batch_timeout_ms / 1e3)
        )
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        say_ready(port)
        signal.sigwait(signals)
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
