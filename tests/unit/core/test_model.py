"""core/model.py: how a request's words find a model, and what a model carries for its tasks."""

import pytest

from neuronpipe.core.errors import InvalidInput, ModelNotFound, Unavailable
from neuronpipe.core.model import AdapterSpec, ModelRoute, ModelTable, TaskFacts, encoding_traits
from neuronpipe.tasks.scores import ClassifierFacts
from tests.unit.model_specs import model_spec

_TABLE = ModelTable({("b", 2): "b2", ("a", 10): "a10", ("b", 1): "b1", ("a", 9): "a9"})
_ROUTED = ModelTable(
    {("a", 1): "a1", ("a", 2): "a2", ("a", 3): "a3", ("b", 1): "b1"},
    {"a": ModelRoute({"stable": 1, "canary": 2, "next": 4}, ((1, 90.0), (2, 7.0), (3, 3.0)))},
)
_NAMED = ModelTable(
    {("a", 1): "a1", ("a", 2): "a2", ("b", 1): "b1"},
    {"a": ModelRoute({"stable": 1}, ((1, 1.0), (2, 1.0)))},
    {"org/a": "a", "gpt": "gone", "b": "a"},
)
_ADAPTED = ModelTable(
    {("a", 1): "a1", ("a", 2): "a2", ("a/x", 1): "x1", ("a/x", 2): "x2", ("a/y", 2): "y2", ("b", 1): "b1"},
    {"a": ModelRoute({"stable": 1}, ((1, 1.0),))},
    {"owner/a": "a"},
)
# Of the chi-square distribution with two degrees of freedom: what one fair split in a thousand exceeds.
_CHI_SQUARE = 13.816


@pytest.mark.parametrize(
    ("table", "name", "version", "found"),
    [
        pytest.param(_TABLE, "a", "", "a10", id="the newest by number, not by letter, without a version"),
        pytest.param(_TABLE, "a", "9", "a9", id="a version by its number"),
        pytest.param(_ROUTED, "a", "stable", "a1", id="a version by its alias"),
        pytest.param(_ROUTED, "a", "canary", "a2", id="another version by its alias"),
        pytest.param(_ROUTED, "a", "", "a1", id="the version with the largest share without a key"),
        pytest.param(_NAMED, "org/a", "2", "a2", id="a version by the model's other name"),
        pytest.param(_NAMED, "org/a", "stable", "a1", id="an alias by the model's other name"),
        pytest.param(_NAMED, "b", "", "b1", id="a served model before an other name"),
        pytest.param(_ADAPTED, "a/x", "", "x1", id="an adapter by the route of its base"),
        pytest.param(_ADAPTED, "a/x", "stable", "x1", id="an adapter by an alias of its base"),
        pytest.param(_ADAPTED, "a/x", "2", "x2", id="an adapter by its version"),
        pytest.param(_ADAPTED, "owner/a/x", "", "x1", id="an adapter by an other name of its base"),
    ],
)
def test_a_request_finds(table: ModelTable[str], name: str, version: str, found: str) -> None:
    assert table.find(name, version) == found


@pytest.mark.parametrize(
    ("table", "name", "version", "error", "problem"),
    [
        (_TABLE, "c", "", ModelNotFound, "model 'c' is not served; the served models are: a, b$"),
        (_TABLE, "a", "3", ModelNotFound, "model 'a' has no version 3; it has: 9, 10$"),
        (_ROUTED, "a", "next", Unavailable, "model 'a' version 4, its next, is not loaded"),
        (_ROUTED, "a", "newest", InvalidInput, "or an alias of the model, which has: stable, canary$"),
        (_ROUTED, "b", "stable", InvalidInput, "is not a whole number$"),
        (_NAMED, "gpt", "", ModelNotFound, "model 'gone' is not served"),
        (_NAMED.only(frozenset("b")), "org/a", "", ModelNotFound, "model 'org/a' is not served; .* models are: b$"),
        (_ADAPTED, "a/z", "", ModelNotFound, "model 'a/z' is not served; of 'a' there are: a, a/x, a/y$"),
        (_ADAPTED, "owner/a/z", "", ModelNotFound, "model 'a/z' is not served; of 'a' there are: a, a/x, a/y$"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(
    table: ModelTable[str], name: str, version: str, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        table.find(name, version)


def test_entries_come_by_name_and_then_version() -> None:
    assert list(_TABLE) == ["a9", "a10", "b1", "b2"]


def test_only_the_newest_version_or_that_with_the_largest_share_is_the_default() -> None:
    assert [_TABLE.is_default("a", version) for version in (9, 10)] == [False, True]
    assert [_ROUTED.is_default("a", version) for version in (1, 2, 3)] == [True, False, False]


@pytest.mark.parametrize("version", ["latest", "1.0", "-1", " 1", "²", "١"])
def test_a_version_that_is_no_whole_number_is_refused(version: str) -> None:
    with pytest.raises(InvalidInput, match="is not a whole number") as caught:
        _TABLE.find("a", version)
    assert caught.value.field == "version"


@pytest.mark.parametrize(("name", "version"), [("a", "9" * 5000), ("x" * 5000, "")], ids=["version", "name"])
def test_thousands_of_characters_are_refused_without_repeating_them(name: str, version: str) -> None:
    # int() raises ValueError from 4,301 digits on, and an answer that repeats them all would not fit into gRPC's
    # trailers.
    with pytest.raises((InvalidInput, ModelNotFound)) as caught:
        _TABLE.find(name, version)
    assert len(caught.value.message) < 500


def test_requests_without_a_version_are_shared_out_as_the_route_says() -> None:
    count = 20_000
    found = [_ROUTED.find("a", "", f"key {number}") for number in range(count)]
    expected = {"a1": 0.90 * count, "a2": 0.07 * count, "a3": 0.03 * count}
    statistic = sum((found.count(name) - wanted) ** 2 / wanted for name, wanted in expected.items())
    assert statistic < _CHI_SQUARE


def test_the_same_key_gets_the_same_version_also_when_its_version_gets_a_larger_share() -> None:
    before = ModelRoute({}, ((1, 95.0), (2, 5.0)))
    after = ModelRoute({}, ((1, 75.0), (2, 25.0)))
    keys = [f"user-{number}" for number in range(5_000)]
    had = {key for key in keys if before.pick("m", key) == 2}
    assert had == {key for key in keys if before.pick("m", key) == 2}
    assert had < {key for key in keys if after.pick("m", key) == 2}


def test_models_share_out_the_same_keys_each_in_its_own_way() -> None:
    route = ModelRoute({}, ((1, 50.0), (2, 50.0)))
    keys = [f"user-{number}" for number in range(1_000)]
    same = sum(route.pick("m", key) == route.pick("n", key) for key in keys)
    assert 400 < same < 600


def test_a_version_that_is_not_there_gets_no_share() -> None:
    table = ModelTable({("a", 1): "a1"}, {"a": ModelRoute({}, ((1, 1.0), (2, 99.0)))})
    assert {table.find("a", "", f"key {number}") for number in range(100)} == {"a1"}


def test_a_part_of_a_table_keeps_its_routes() -> None:
    part = _ROUTED.only(frozenset({"a"}))
    assert part.find("a", "canary") == "a2"
    assert {part.find("a", "", f"key {number}") for number in range(500)} == {"a1", "a2", "a3"}


def test_another_name_shares_out_requests_as_the_models_name_does() -> None:
    keys = [f"key {number}" for number in range(20)]
    assert [_NAMED.find("org/a", "", key) for key in keys] == [_NAMED.find("a", "", key) for key in keys]


def test_a_part_of_a_table_keeps_the_aliases_of_its_models() -> None:
    assert _NAMED.only(frozenset({"a"})).find("org/a", "2") == "a2"


class _Facts(TaskFacts):
    encoded = ("seen",)
    public_fields = ("seen",)

    seen: int
    unseen: int = 0


class _OtherFacts(TaskFacts):
    other: int = 0


def test_a_task_gets_its_own_facts() -> None:
    model = model_spec(facts={"a": _OtherFacts(), "b": _Facts(seen=3)})
    assert _Facts.of(model) == _Facts(seen=3)


def test_a_model_without_a_tasks_facts_is_named() -> None:
    with pytest.raises(LookupError, match="model 'small' has no _Facts"):
        _Facts.of(model_spec())


def test_facts_of_a_task_that_nobody_declared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"facts\.a\.seen"):
        model_spec(facts={"a": {"seen": 3}})


def test_encodings_depend_on_the_facts_that_a_task_says_and_on_no_others() -> None:
    spec, same, other = (
        model_spec(facts={"a": _Facts(seen=seen, unseen=unseen)}) for seen, unseen in ((1, 1), (1, 2), (2, 1))
    )
    assert (
        encoding_traits(spec)
        == encoding_traits(same)
        == encoding_traits(model_spec(facts={"b": _OtherFacts(), **spec.facts}))
    )
    assert encoding_traits(spec) != encoding_traits(other)


def test_what_callers_are_told_is_what_the_tasks_say() -> None:
    assert model_spec(facts={"a": _Facts(seen=3), "b": _OtherFacts()}).public_facts == {"seen": 3}


def test_a_stage_finds_a_model_by_its_key_whatever_its_route() -> None:
    assert [_ROUTED.at(("a", version)) for version in (1, 2)] == ["a1", "a2"]
    with pytest.raises(ModelNotFound, match=r"model 'a' has no version 9; it has: 1, 2, 3$"):
        _ROUTED.at(("a", 9))


def test_part_of_a_table_has_the_adapters_of_its_models_and_adapters_that_are_named_alone() -> None:
    assert list(_ADAPTED.only(frozenset({"a"}))) == ["a1", "a2", "x1", "x2", "y2"]
    assert list(_ADAPTED.only(frozenset({"a/x", "b"}))) == ["x1", "x2", "b1"]


def test_an_adapter_with_labels_of_its_own_is_described_with_them() -> None:
    spec = model_spec(adapters=(AdapterSpec(name="x", labels=("p", "q", "r"), score_function="sigmoid"),))
    adapted = spec.adapted(1)
    assert (adapted.name, adapted.labels, adapted.adapter) == (f"{spec.name}/x", ("p", "q", "r"), 1)
    assert adapted.outputs[0].axes == (3,)
    score_functions = (ClassifierFacts.of(adapted).score_function, ClassifierFacts.of(spec).score_function)
    assert score_functions == ("sigmoid", "softmax")
