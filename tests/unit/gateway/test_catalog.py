"""gateway/catalog.py: models as callers see them."""

from pathlib import Path

import pytest
import pytest_asyncio

from neuronpipe.api.v1.models_pb2 import GetModelRequest, Model, VersionState
from neuronpipe.bundles.manifest import file_sha256
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.metrics import Meters, Telemetry
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.routing import open_gateway_models
from tests.servers.door import models_of
from tests.unit.bundles.written import write_bundle
from tests.unit.model_specs import model_spec


@pytest_asyncio.fixture
async def catalog(tmp_path: Path) -> Catalog:
    for name, version in (("b", 1), ("a", 2), ("a", 10)):
        write_bundle(tmp_path, name, version)
    models = open_gateway_models(Meters(), lambda bundle: False)
    for bundle in read_repository(tmp_path):
        await models.open(bundle)
    return Catalog(models)


def test_models_are_listed_by_name_and_then_version(catalog: Catalog) -> None:
    listed = [(model.name, model.version) for model in catalog.list_models().models]
    assert listed == [("a", "2"), ("a", "10"), ("b", "1")]


def test_the_newest_version_of_each_model_is_the_default(catalog: Catalog) -> None:
    assert [model.is_default for model in catalog.list_models().models] == [False, True, True]


def test_a_model_is_described_by_its_manifest(catalog: Catalog, tmp_path: Path) -> None:
    assert catalog.get_model(GetModelRequest(name="a", version="2")).model == Model(
        name="a",
        version="2",
        is_default=False,
        task="text_classification",
        tasks=["text_classification"],
        labels=["a", "b", "c"],
        max_tokens=16,
        architecture="SmallModel",
        backends=["openvino", "fake"],
        dtype="float32",
        digest=file_sha256(tmp_path / "a/2/manifest.json"),
        state=VersionState.VERSION_STATE_READY,
        is_desired=True,
    )


@pytest.mark.parametrize(
    ("task", "described"),
    [
        ("sentence_embedding", {"embedding_dimensions": 4}),
        ("feature_extraction", {"embedding_dimensions": 4}),
        ("fill_mask", {"mask_token": "[M]"}),
        ("question_answering", {}),
    ],
)
def test_a_model_is_described_by_what_its_tasks_tell_of_it(task: str, described: dict[str, object]) -> None:
    catalog = Catalog(models_of([model_spec(task, name="m")], Telemetry()))
    model = catalog.get_model(GetModelRequest(name="m")).model
    assert {name: getattr(model, name) for name in described} == described
    found = (model.embedding_dimensions, model.mask_token)
    assert found == (described.get("embedding_dimensions", 0), described.get("mask_token", ""))


def test_without_a_version_the_newest_is_described(catalog: Catalog) -> None:
    assert catalog.get_model(GetModelRequest(name="a")).model.version == "10"


def test_a_question_without_a_name_is_refused(catalog: Catalog) -> None:
    with pytest.raises(InvalidInput, match=r"^name: is empty$"):
        catalog.get_model(GetModelRequest())
