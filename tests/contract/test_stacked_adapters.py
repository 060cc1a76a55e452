"""`--adapter`: adapters of peft in the bundle of their base, chosen by each request, which answer as peft does."""

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from neuronpipe.api.v1.inference_pb2 import CacheOutcome, InferRequest
from neuronpipe.core.errors import InvalidInput, ModelNotFound, SetupError
from neuronpipe.stages.neuron_executor.backends import load_backend
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest, compute
from neuronpipe.tasks.inputs.kind import adapted, input_kind
from tests.callers.requests import classify, embed, tag
from tests.models.adapters import save_adapter
from tests.models.architectures import make_source
from tests.models.compiling import compile_model
from tests.models.repository import bert_config, classifier, embedder, for_neuron, save, tagger, tokenizer
from tests.systems.pipelines import System, local_system

# Raised inside peft and transformers; nothing that we call.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.sampled,
]

_TEXTS = ["A fine day.", "The train is late again, and nobody says why.", "Where is my parcel?"]
# Adapters of other ranks and layers than their neighbours, one with the scale of rslora.
_KINDS: dict[str, dict[str, Any]] = {
    "query": {"r": 2, "lora_alpha": 16, "target_modules": ["query"]},
    "all": {"r": 4, "lora_alpha": 4, "target_modules": "all-linear", "use_rslora": True},
    "ranks": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["value"],
        "rank_pattern": {"layer.1.attention.self.value": 3},
    },
}


def _embedders(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A base model, and the adapters of _KINDS by name, saved beside it."""
    base = embedder(folder / "base")
    kinds = enumerate(_KINDS.items())
    load = transformers.BertModel.from_pretrained
    adapted = {name: save_adapter(load(base), folder / name, seed, **kind) for seed, (name, kind) in kinds}
    return base, {"": load(base).eval(), **adapted}


def _named(folder: Path, *names: str) -> tuple[str, ...]:
    return tuple(f"{name}={folder / name}" for name in names)


def _model(adapter: str) -> str:
    """The name of an adapter of m in requests; empty for m itself."""
    return f"m/{adapter}" if adapter else "m"


def _vector(model: Any, text: str, encode: Any = None) -> Any:
    with torch.inference_mode():
        mean = model(**(encode or tokenizer())(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    return torch.nn.functional.normalize(mean, dim=0).numpy()


def _scores(model: Any, text: str) -> Any:
    with torch.inference_mode():
        return model(**tokenizer()(text, return_tensors="pt")).logits[0].softmax(-1).tolist()


async def _answers(system: System, requests: Sequence[InferRequest]) -> list[Any]:
    return [answer.result for answer in await asyncio.gather(*map(system.infer, requests))]


@pytest.fixture(scope="module")
def embedders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a base and its adapters, and those models by adapter; the folder has a repository of them as m."""
    folder = tmp_path_factory.mktemp("embedders")
    base, models = _embedders(folder)
    options: dict[str, Any] = {"adapters": _named(folder, *_KINDS), "max_divergence": 1e-4, "cache_results": True}
    compile_model(base, folder / "repository", "sentence_embedding", **options)
    return folder, models


async def _check_rows(repository: Path, models: Mapping[str, Any]) -> None:
    asked = [(name, text) for text in _TEXTS for name in models]
    async with local_system(repository) as system:
        answers = await asyncio.gather(*(system.infer(embed(text, model=_model(name))) for name, text in asked))
        names = [model.name for model in await system.list_models()]
    assert names == ["m", "m/all", "m/query", "m/ranks"]
    assert max(answer.usage.batch_size for answer in answers) > 1, "no batch had several rows"
    vectors = [answer.result.sentence_embedding.embedding for answer in answers]
    expected = [_vector(models[name], text) for name, text in asked]
    # float32 in another order of sums; adapters change the vectors by more than 0.1.
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-4)
    assert np.abs(np.array(vectors[1]) - vectors[0]).max() > 0.1


async def test_rows_of_a_batch_have_the_vectors_of_peft_with_adapters(embedders: tuple[Path, dict[str, Any]]) -> None:
    folder, models = embedders
    await _check_rows(folder / "repository", models)


async def test_rows_of_a_batch_have_their_adapters_on_torch_too(
    embedders: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, models = embedders
    options: dict[str, Any] = {"adapters": _named(folder, *_KINDS), "backend": "torch", "max_divergence": 1e-4}
    compile_model(folder / "base", tmp_path, "sentence_embedding", **options)
    await _check_rows(tmp_path, models)


async def test_results_in_the_cache_are_those_of_their_adapter(embedders: tuple[Path, dict[str, Any]]) -> None:
    folder, models = embedders
    hits = []
    async with local_system(folder / "repository") as system:
        for name in ("", "all", "all", ""):
            answer = await system.infer(embed("one", model=_model(name)))
            np.testing.assert_allclose(
                answer.result.sentence_embedding.embedding, _vector(models[name], "one"), atol=1e-4
            )
            hits.append(answer.usage.result_cache == CacheOutcome.CACHE_OUTCOME_HIT_MEMORY)
    assert hits == [False, False, True, True]


async def test_an_unknown_adapter_is_not_found_among_those_there_are(embedders: tuple[Path, dict[str, Any]]) -> None:
    async with local_system(embedders[0] / "repository") as system:
        there_are = "of 'm' there are: m, m/all, m/query, m/ranks"
        with pytest.raises(ModelNotFound, match=f"model 'm/most' is not served; {there_are}"):
            await system.infer(embed("a", model="m/most"))


def test_a_version_with_another_adapter_shares_the_base(embedders: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = embedders
    repository = shutil.copytree(folder / "repository", tmp_path / "repository")
    adapters = (*_named(folder, *_KINDS), f"more={folder / 'all'}")
    compile_model(folder / "base", repository, "sentence_embedding", adapters=adapters)
    first, second = (repository / f"m/{version}/artifacts/openvino" for version in (1, 2))
    assert (first / "model.bin").samefile(second / "model.bin")
    assert (second / "adapters.npz").stat().st_size < (second / "model.bin").stat().st_size / 20


async def test_task_adapters_of_jina_v3_change_its_embeddings_too(tmp_path: Path) -> None:
    base = make_source(tmp_path / "base", "Jina v3", "sentence_embedding")
    load, encode = transformers.AutoModel.from_pretrained, transformers.AutoTokenizer.from_pretrained(base)
    layers = ["word_embeddings", "token_type_embeddings", "q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]
    names = ("retrieval.query", "retrieval.passage", "text-matching")
    models = {
        name: save_adapter(load(base), tmp_path / name, seed, r=4, lora_alpha=8, target_modules=layers)
        for seed, name in enumerate(names)
    }
    compile_model(base, tmp_path / "repository", "sentence_embedding", adapters=_named(tmp_path, *names))
    asked = [(name, text) for text in _TEXTS for name in names]
    async with local_system(tmp_path / "repository") as system:
        results = await _answers(system, [embed(text, model=_model(name)) for name, text in asked])
    expected = [_vector(models[name], text, encode) for name, text in asked]
    np.testing.assert_allclose([result.sentence_embedding.embedding for result in results], expected, atol=1e-4)


async def test_buckets_of_neuron_have_the_adapters(
    neuron_double: object, embedders: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, models = embedders
    options: dict[str, Any] = {"adapters": _named(folder, "all", "query"), **for_neuron(tmp_path, "3x16")}
    bundle = compile_model(folder / "base", tmp_path / "repository", "sentence_embedding", **options)
    artifact = bundle.artifact("neuronx")
    kind = input_kind(bundle.spec)
    ids = np.asarray(tokenizer()(_TEXTS[0])["input_ids"], np.int32)
    rows = [adapted({"input_ids": ids}, number) for number in range(3)]
    with bundle.artifact_files(artifact) as files:
        resources: dict[str, Any] = {"buckets": artifact.buckets, "versions": artifact.versions}
        request = BackendRequest(bundle.spec, files, artifact.properties, cores=1, threads=1, **resources)
        backend = load_backend("neuronx", request)
    try:
        outputs = await compute(backend, 0, kind.pad(rows, 16))
    finally:
        backend.close()
    expected = [_vector(models[name], _TEXTS[0]) for name in ("", "all", "query")]
    vectors = outputs["sentence_embedding"]
    np.testing.assert_allclose(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), expected, atol=1e-4)


async def test_adapters_have_labels_of_their_own(tmp_path: Path) -> None:
    base = classifier(tmp_path / "base")
    load = transformers.BertForSequenceClassification.from_pretrained
    settings: dict[str, Any] = {
        "r": 4,
        "target_modules": ["query", "value"],
        "modules_to_save": ["classifier", "pooler.dense"],
    }
    models = {
        "two": save_adapter(load(base, num_labels=2, ignore_mismatched_sizes=True), tmp_path / "two", 1, **settings),
        "six": save_adapter(load(base, num_labels=6, ignore_mismatched_sizes=True), tmp_path / "six", 2, **settings),
        "same": save_adapter(load(base), tmp_path / "same", 3, r=4, target_modules=["key"]),
        "": load(base).eval(),
    }
    labels = {"two": ["bad", "good"], "six": [f"LABEL_{index}" for index in range(6)]}
    base_labels = ["calm", "busy", "lost", "found"]
    (tmp_path / "two/config.json").write_text(json.dumps({"id2label": {"0": "bad", "1": "good"}}))
    compile_model(base, tmp_path / "repository", adapters=_named(tmp_path, "two", "six", "same"))
    async with local_system(tmp_path / "repository") as system:
        for name, model in models.items():
            expected = labels.get(name, base_labels)
            requests = [classify(text, model=_model(name), top_k=len(expected)) for text in _TEXTS]
            for text, result in zip(_TEXTS, await _answers(system, requests), strict=True):
                scores = {label.label: label.score for label in result.text_classification.labels}
                assert sorted(scores) == sorted(expected)
                np.testing.assert_allclose([scores[label] for label in expected], _scores(model, text), atol=1e-4)
        assert list((await system.get_model("m/two")).labels) == labels["two"]
        with pytest.raises(InvalidInput, match="top_k: 3, the model has 2 labels"):
            await system.infer(classify("a", model="m/two", top_k=3))


async def test_base_without_a_head_answers_by_its_adapters_alone(tmp_path: Path) -> None:
    base = save(transformers.BertForMaskedLM(bert_config()), tmp_path / "base")
    load = transformers.BertForSequenceClassification.from_pretrained
    settings: dict[str, Any] = {"r": 4, "target_modules": ["query"], "modules_to_save": ["classifier", "pooler"]}
    models = {
        name: save_adapter(load(base, num_labels=seed), tmp_path / name, seed, task_type="SEQ_CLS", **settings)
        for name, seed in {"mood": 3, "topic": 5}.items()
    }
    compile_model(base, tmp_path / "repository", "text_classification", adapters=_named(tmp_path, *models))
    async with local_system(tmp_path / "repository") as system:
        for name, model in models.items():
            (result,) = await _answers(system, [classify(_TEXTS[1], model=_model(name))])
            (best,) = result.text_classification.labels
            scores = _scores(model, _TEXTS[1])
            assert best.label == f"LABEL_{np.argmax(scores)}"
            assert best.score == pytest.approx(max(scores), abs=1e-4)
        assert [model.name for model in await system.list_models()] == ["m/mood", "m/topic"]
        with pytest.raises(ModelNotFound, match="model 'm' is not served; of 'm' there are: m/mood, m/topic"):
            await system.infer(classify("a", model="m"))


async def test_tags_of_adapters(tmp_path: Path) -> None:
    base = tagger(tmp_path / "base")
    load = transformers.BertForTokenClassification.from_pretrained
    settings: dict[str, Any] = {
        "r": 4,
        "target_modules": ["query"],
        "task_type": "TOKEN_CLS",
        "modules_to_save": ["classifier"],
    }
    model = save_adapter(load(base, num_labels=3, ignore_mismatched_sizes=True), tmp_path / "tags", **settings)
    compile_model(base, tmp_path / "repository", adapters=_named(tmp_path, "tags"))
    async with local_system(tmp_path / "repository") as system:
        (result,) = await _answers(system, [tag(_TEXTS[1], model="m/tags", keep_all_labels=True)])
    with torch.inference_mode():
        scores = model(**tokenizer()(_TEXTS[1], return_tensors="pt")).logits[0, 1:-1].softmax(-1)
    entities = result.token_classification.entities
    assert [entity.label for entity in entities] == [f"LABEL_{index}" for index in scores.argmax(-1).tolist()]
    np.testing.assert_allclose([entity.score for entity in entities], scores.max(-1).values, atol=1e-4)


def _changed(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "query/adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


@pytest.mark.parametrize(
    ("adapter", "change", "options", "problem"),
    [
        ("query", lambda folder: None, {"adapters": ("query",)}, "write NAME=FOLDER"),
        ("query", lambda folder: None, {"adapters": ("a/b=folder",)}, "write NAME=FOLDER"),
        ("query", lambda folder: None, {"adapters": ("rerank=folder",)}, "rerank is the name of a task"),
        ("query", lambda folder: None, {"backend": "fake"}, "--adapter: not with --backend fake"),
        ("query", lambda folder: None, {"dtype": "int8"}, "--adapter: not with --dtype int8"),
        ("query", lambda folder: None, {"task": "fill_mask"}, "not supported for the task fill_mask"),
        ("none", lambda folder: None, {}, "none has no adapter_config.json"),
        ("query", _changed(use_dora=True), {}, "sets use_dora to True, which is not supported by request"),
        ("query", _changed(peft_type="IA3"), {}, "sets peft_type to 'IA3', which is not supported by request"),
        ("wide", lambda folder: None, {}, "encoder.layer.0.attention.self.query has another size in its base model"),
        ("deep", lambda folder: None, {}, "its base model has no .*encoder.layer.2.attention.self.query"),
    ],
)
def test_what_cannot_be_an_adapter_is_refused(
    adapter: str, change: Callable[[Path], None], options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    base = save(transformers.BertForMaskedLM(bert_config()), tmp_path / "base")
    settings: dict[str, Any] = {"r": 2, "target_modules": ["query"]}
    sizes: dict[str, Any] = {"query": {}, "wide": {"hidden_size": 64}, "deep": {"num_hidden_layers": 3}}
    if adapter in sizes:
        config = transformers.BertConfig(**bert_config().to_dict() | sizes[adapter])
        save_adapter(transformers.BertModel(config), tmp_path / adapter, **settings)
    change(tmp_path)
    request = {"task": "sentence_embedding", "adapters": _named(tmp_path, adapter), **options}
    with pytest.raises(SetupError, match=problem):
        compile_model(base, tmp_path / "repository", **request)
