"""What an endpoint may be: the limits of the published serverless endpoints, names, numbers of executors."""

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.deploy import HuggingFaceModel, ServerlessConfig
from neuronpipe.deploy.endpoint import Endpoint, endpoint_name
from neuronpipe.deploy.model import make_target


@pytest.mark.parametrize("memory_mb", [1024, 2048, 3072, 4096, 5120, 6144])
def test_every_published_memory_size_is_taken(memory_mb: int) -> None:
    assert ServerlessConfig(memory_mb, 200).memory_mb == memory_mb


@pytest.mark.parametrize(
    ("memory_mb", "max_concurrency", "expected"),
    [
        (0, 5, "memory_mb: 0, must be 1024 to 6144 in steps of 1024"),
        (1500, 5, "memory_mb: 1500, must be 1024 to 6144 in steps of 1024"),
        (7168, 5, "memory_mb: 7168, must be 1024 to 6144 in steps of 1024"),
        (2048, 0, "max_concurrency: 0, must be 1 to 200"),
        (2048, 201, "max_concurrency: 201, must be 1 to 200"),
    ],
)
def test_what_no_serverless_endpoint_has_is_refused(memory_mb: int, max_concurrency: int, expected: str) -> None:
    with pytest.raises(SetupError) as refused:
        ServerlessConfig(memory_mb, max_concurrency)
    assert str(refused.value).startswith(expected)


@pytest.mark.parametrize("name", ["", "Sentiment", "a b", "-a", "a-", "a" * 43, "a_b"])
def test_a_name_that_a_place_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(SetupError, match="choose one with --name"):
        Endpoint(name=name, source="m")


@pytest.mark.parametrize(("fewest", "most"), [(2, 1), (-1, 1), (0, 0), (1, 1001)])
def test_numbers_of_executors_are_in_order_and_bounded(fewest: int, most: int) -> None:
    with pytest.raises(SetupError, match=f"min and max: {fewest} and {most}"):
        Endpoint(name="m", source="m", min_executors=fewest, max_executors=most)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("distilbert/Distilbert_SST.2", "distilbert-sst-2"), ("/models/m/", "m"), ("x" * 50, "x" * 42)],
)
def test_the_default_name_is_one_that_every_place_takes(source: str, expected: str) -> None:
    assert Endpoint(name=endpoint_name(source), source=source).name == expected


_AWS = {"image": "i", "role": "r", "bucket": "s3://b"}


@pytest.mark.parametrize(
    ("to", "changes", "options", "expected"),
    [
        ("nowhere", {}, {}, "to: 'nowhere', must be one of compose, kubernetes, sagemaker"),
        ("compose", {"max_executors": 4}, {}, "min and max: 1 and 4; Compose keeps one number of executors"),
        ("compose", {"min_executors": 0}, {}, "min and max: 0 and 1; Compose keeps one number of executors"),
        ("kubernetes", {"backend": "fake"}, {}, "backend 'fake': must be one of openvino, neuronx, torch"),
        ("kubernetes", {}, {}, "task: is needed where the cluster compiles"),
        ("compose", {}, {}, "task: is needed for --to compose"),
        ("compose", {"source": "./no-such", "task": "fill-mask"}, {}, "./no-such: no such folder"),
        ("compose", {"source": "", "task": "fill-mask"}, {}, "SOURCE: is empty"),
        ("compose", {"task": "fill-mask"}, {"port": 0}, "port and http_port: 0 and 8080; must be 1 to 65535"),
        ("compose", {"task": "fill-mask"}, {"http_port": 65536}, "port and http_port: 50050 and 65536"),
        ("compose", {"task": "fill-mask"}, {"port": 8080}, "port and http_port: 8080 and 8080"),
        ("kubernetes", {"task": "nonsense"}, {}, "task 'nonsense': is not known; there are: text-classification"),
        ("kubernetes", {"source": "/tmp"}, {}, "/tmp: a cluster does not reach this folder"),
        ("sagemaker", {}, {}, "image: is needed for --to sagemaker"),
        ("sagemaker", {}, {"image": "i", "role": "r", "bucket": "gs://b"}, "bucket 'gs://b': must begin with"),
        ("sagemaker", {"min_executors": 0}, _AWS, "min: 0, but a real-time endpoint has at least one instance"),
        (
            "sagemaker",
            {"serverless": ServerlessConfig()},
            {**_AWS, "asynchronous": "s3://b/out"},
            "an endpoint is serverless or asynchronous, not both",
        ),
        (
            "sagemaker",
            {"serverless": ServerlessConfig(), "max_executors": 2},
            _AWS,
            "max: a serverless endpoint scales by itself",
        ),
    ],
)
def test_what_a_place_cannot_do_is_refused_before_anything_is_done(
    to: str, changes: dict[str, object], options: dict[str, object], expected: str
) -> None:
    endpoint = Endpoint(**{"name": "m", "source": "hub/m", **changes})  # type: ignore[arg-type]
    with pytest.raises(SetupError) as refused:
        make_target(to, endpoint, **options)
    assert str(refused.value).startswith(expected)


def test_python_refuses_the_same() -> None:
    with pytest.raises(SetupError, match="Compose keeps one number"):
        HuggingFaceModel("hub/m", task="text-classification").deploy("compose", max_executors=4)


def test_python_says_where_the_images_are(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes: list[str] = []

    def refuse(to: str, endpoint: Endpoint) -> None:
        prefixes.append(endpoint.image_prefix)
        raise SetupError("seen")

    monkeypatch.setattr("neuronpipe.deploy.model.make_target", refuse)
    with pytest.raises(SetupError, match="seen"):
        HuggingFaceModel("hub/m").deploy("kubernetes", image_prefix="example.com/np")
    assert prefixes == ["example.com/np"]
