"""matrix.py: which cells a run has; models.py: what they are of."""

from dataclasses import replace
from pathlib import Path

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.matrix import (
    DEFAULT_MODELS,
    LATENCY,
    THROUGHPUT,
    MatrixRequest,
    find_models,
    make_matrix,
    published_model,
)

_BERT, _VIT = published_model("bert-base-uncased"), published_model("vit-base-patch16-224")


def test_a_star_varies_one_thing_at_a_time() -> None:
    request = MatrixRequest([_BERT], lengths=(8, 128), batches=(1, 4), dtypes=("float32", "bfloat16"), cores=(1, 2))
    matrix = make_matrix(replace(request, throughput_batches=(1,)))
    found = {(cell.variant.dtype, cell.variant.cores, cell.mode, cell.batch, cell.length) for cell in matrix.cells}
    assert found == {
        ("float32", 1, LATENCY, 1, 8),
        ("float32", 1, LATENCY, 1, 128),
        ("float32", 1, LATENCY, 4, 128),
        ("bfloat16", 1, LATENCY, 1, 128),
        ("float32", 2, THROUGHPUT, 1, 128),
    }


def test_a_product_has_every_combination_and_one_caller_counts_once() -> None:
    request = MatrixRequest([_BERT], lengths=(8, 16), batches=(1, 2), cores=(1, 2), is_product=True)
    # 2 lengths x 2 batches x (one core in one mode, two cores in two).
    assert len(make_matrix(request).cells) == 2 * 2 * 3


def test_images_have_no_lengths() -> None:
    assert {cell.length for cell in make_matrix(MatrixRequest([_VIT], batches=(1, 2))).cells} == {0}


def test_short_cells_come_first_and_those_of_a_process_together() -> None:
    cells = make_matrix(MatrixRequest([_VIT, _BERT], dtypes=("float32", "bfloat16"), cores=(1, 2))).cells
    variants = [cell.variant for cell in cells]
    assert [variant for place, variant in enumerate(variants) if variant not in variants[:place]] == list(
        make_matrix(MatrixRequest([_VIT, _BERT], dtypes=("float32", "bfloat16"), cores=(1, 2))).variants
    )
    assert variants[0].model == _VIT.name
    first = [cell.batch for cell in cells if cell.variant == variants[0]]
    assert first == sorted(first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": (0,)}, "--batches 0: must be from 1 to 4,096"),
        ({"lengths": ()}, "--lengths: is empty"),
        ({"modes": ("speed",)}, "--modes speed: must be some of latency, throughput"),
    ],
)
def test_what_is_out_of_range_is_named(changes: dict[str, tuple[int]], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        MatrixRequest([_BERT], **changes)  # type: ignore[arg-type]


def test_a_matrix_that_nobody_waits_for_is_refused() -> None:
    request = MatrixRequest([_BERT], lengths=range(1, 102), batches=range(1, 102), is_product=True)
    with pytest.raises(SetupError, match="cells, the limit is 10,000"):
        make_matrix(request)


def test_models_are_those_that_are_published_most_or_those_that_are_named(tmp_path: Path) -> None:
    assert [model.name for model in find_models((), "", None)] == list(DEFAULT_MODELS)
    with pytest.raises(SetupError, match="--model bert-huge: no such folder, and no published size"):
        find_models(("bert-huge",), "", None)
    with pytest.raises(SetupError, match="two models have this name"):
        find_models((_BERT.name, _BERT.name), "", None)
    with pytest.raises(SetupError, match=r"no config.json"):
        find_models((str(tmp_path),), "", None)


def test_a_bundle_with_buckets_has_one_for_each_of_its_cells_whatever_their_cores() -> None:
    request = MatrixRequest(
        [_BERT], lengths=(8, 128), batches=(1,), throughput_batches=(4,), backends=("neuronx", "openvino"), cores=(1, 2)
    )
    matrix = make_matrix(request)
    assert sorted(matrix.buckets(_BERT.name, "neuronx", "float32")) == ["1x128", "1x8", "4x128"]
    assert matrix.buckets(_BERT.name, "neuronx", "bfloat16") == ()
    assert matrix.buckets(_BERT.name, "openvino", "float32") == ()
