"""A bundle that an earlier release compiled is read as one of today's: golden manifests of schema version 3, one a
task.

They were written by `neuronpipe compile --backend fake` of the last release with that schema, for the models of
tests/models.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.bundles.manifest import SCHEMA_VERSION, Manifest
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.tasks.feature_extraction import FeatureFacts
from neuronpipe.tasks.fill_mask import FillMaskFacts
from neuronpipe.tasks.question_answering import QuestionAnsweringFacts
from neuronpipe.tasks.rerank import RerankFacts
from neuronpipe.tasks.scores import ClassifierFacts
from neuronpipe.tasks.vectors import EmbeddingFacts
from neuronpipe.tasks.zero_shot_classification import ZeroShotFacts

_GOLDEN = Path(__file__).parent / "golden/manifests_3"
_EMBEDDING = EmbeddingFacts(embedding_dimensions=32, prompt="query: ")

# task → the facts of its model, as the sources say: BERT's [CLS] is 101 and its [MASK] 103, vectors have 32 dimensions.
_FACTS: dict[str, dict[str, TaskFacts]] = {
    "text_classification": {"text_classification": ClassifierFacts(score_function="softmax")},
    "image_classification": {"image_classification": ClassifierFacts(score_function="softmax")},
    "token_classification": {"token_classification": TaskFacts()},
    "question_answering": {"question_answering": QuestionAnsweringFacts(cls_token_id=101)},
    "fill_mask": {"fill_mask": FillMaskFacts(mask_token="[MASK]", mask_token_id=103)},
    "feature_extraction": {"feature_extraction": FeatureFacts(embedding_dimensions=32)},
    "sentence_embedding": {"sentence_embedding": _EMBEDDING, "sentence_similarity": _EMBEDDING},
    "sentence_similarity": {"sentence_embedding": _EMBEDDING, "sentence_similarity": _EMBEDDING},
    "rerank": {
        "rerank": RerankFacts(score_function="none", prompt="Find: "),
        "text_classification": ClassifierFacts(score_function="sigmoid"),
    },
    "zero_shot_classification": {
        "zero_shot_classification": ZeroShotFacts(entailment_id=2),
        "text_classification": ClassifierFacts(score_function="softmax"),
    },
}


@pytest.mark.parametrize("task", _FACTS)
def test_a_manifest_of_version_3_is_read_with_each_tasks_facts(task: str) -> None:
    manifest = Manifest.read(_GOLDEN / f"{task}.json")
    assert manifest.model.facts == _FACTS[task]
    assert set(manifest.model.tasks) == set(_FACTS[task])


@pytest.mark.parametrize("task", _FACTS)
def test_all_else_of_a_manifest_of_version_3_stays_as_it_was(task: str) -> None:
    path = _GOLDEN / f"{task}.json"
    manifest = Manifest.read(path)
    former, read = json.loads(path.read_bytes()), manifest.model_dump(mode="json", exclude_unset=True)
    assert read["schema_version"] == SCHEMA_VERSION
    common = ModelSpec.model_fields.keys() - {"facts", "tokens"}
    model = manifest.model.model_dump(mode="json")
    assert {name: model[name] for name in common} == {name: former["model"][name] for name in common}
    for content in (former, read):
        del content["model"], content["schema_version"]
    assert read == former


@pytest.mark.parametrize(
    ("version", "absent"),
    [
        (1, ("image", "mask_token", "mask_token_id", "also_answers", "rerank_function", "entailment_id")),
        (2, ("image", "mask_token")),
    ],
)
def test_a_manifest_of_an_earlier_version_has_fewer_fields(
    version: int, absent: tuple[str, ...], tmp_path: Path
) -> None:
    content: dict[str, Any] = json.loads((_GOLDEN / "text_classification.json").read_bytes())
    content["schema_version"] = version
    for name in absent:
        del content["model"][name]
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(content))
    assert Manifest.read(path) == Manifest.read(_GOLDEN / "text_classification.json")


@pytest.mark.parametrize("task", _FACTS)
def test_a_manifest_that_was_upgraded_and_written_comes_back_unchanged(task: str, tmp_path: Path) -> None:
    upgraded = Manifest.read(_GOLDEN / f"{task}.json")
    path = tmp_path / "manifest.json"
    path.write_text(upgraded.model_dump_json())
    assert Manifest.read(path) == upgraded


def test_a_fact_that_a_task_needs_is_named_where_it_is_missing(tmp_path: Path) -> None:
    content = Manifest.read(_GOLDEN / "fill_mask.json").model_dump(mode="json")
    del content["model"]["facts"]["fill_mask"]["mask_token_id"]
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SetupError, match=r"facts\.fill_mask\.mask_token_id: Field required"):
        Manifest.read(path)


def test_a_fact_that_no_task_knows_is_refused(tmp_path: Path) -> None:
    content = Manifest.read(_GOLDEN / "fill_mask.json").model_dump(mode="json")
    content["model"]["facts"]["fill_mask"]["colour"] = "red"
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SetupError, match=r"facts\.fill_mask\.colour: Extra inputs are not permitted"):
        Manifest.read(path)


@pytest.mark.parametrize(
    "model", [[], {"task": ["a"]}, {"also_answers": 3}, {"facts": []}, {"facts": {"rerank": 1}}], ids=repr
)
@pytest.mark.parametrize("version", [3, 4])
def test_a_model_of_another_shape_is_refused(model: Any, version: int, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"schema_version": version, "model": model}))
    with pytest.raises(SetupError, match="not a valid manifest: "):
        Manifest.read(path)
