"""stages/neuron_executor/shapes.py: few shapes, into which every batch that the policy may form is padded."""

import random

import pytest

from neuronpipe.core.model import ImageSpec
from neuronpipe.stages.neuron_executor.shapes import BatchShape, ShapeMenu
from tests.unit.model_specs import image_spec, image_text_spec, model_spec

_SEEDS = range(20261128, 20261140)
# A length is at most a fifth padding, as the steps are an eighth of the next power of two, or it has fewer padded
# tokens than the least step.
_MOST_PADDING = 1 / 5
_LEAST_STEP = 8


def _menu(max_tokens: int, most_tokens: int) -> ShapeMenu:
    return ShapeMenu(model_spec("sentence_embedding", max_tokens=max_tokens), most_tokens)


@pytest.fixture(params=_SEEDS)
def limits(request: pytest.FixtureRequest) -> tuple[int, int]:
    """A model's limit, and the most tokens of a batch, which may be fewer."""
    generator = random.Random(request.param)
    return generator.choice([generator.randint(1, 600), 128, 512]), generator.choice([generator.randint(1, 5000), 512])


def test_a_length_holds_its_texts_with_little_padding_and_the_last_is_the_models_limit(limits: tuple[int, int]) -> None:
    max_tokens, menu = limits[0], _menu(*limits)
    assert [menu.lengths[-1], sorted(set(menu.lengths))] == [max_tokens, menu.lengths]
    padded = [menu.round_tokens(tokens) for tokens in range(1, max_tokens + 1)]
    assert sorted(set(padded)) == menu.lengths
    assert padded == sorted(padded)
    for tokens, length in enumerate(padded, 1):
        padding = length - tokens
        assert padding >= 0
        assert padding < _LEAST_STEP or padding < _MOST_PADDING * length, (tokens, length)


def test_every_length_has_batches_of_one_and_no_batch_of_several_has_more_than_the_most_tokens(
    limits: tuple[int, int],
) -> None:
    menu = _menu(*limits)
    for length in menu.lengths:
        assert menu.rows_within(1, length) == 1
        most = menu.most_rows(length)
        assert most == 1 or most * length <= limits[1]


def test_a_number_of_sequences_fills_more_than_half_of_itself_and_empty_rows_are_fewer_than_full_ones(
    limits: tuple[int, int],
) -> None:
    menu = _menu(*limits)
    for length in menu.lengths:
        for rows in range(1, 2 * menu.most_rows(length) + 2):
            within, holding = menu.rows_within(rows, length), menu.rows_for(rows, length)
            assert within <= rows <= holding < 2 * rows
            assert menu.rows_within(holding, length) == holding or rows > menu.most_rows(length)
            if rows <= menu.most_rows(length):
                assert 2 * within > rows, (length, rows)
            else:
                assert (within, holding) == (menu.most_rows(length), rows)


def test_the_numbers_of_tokens_of_batches_are_few() -> None:
    # Steps of 8 up to 64, then four steps for each doubling.
    for most_tokens, numbers in (128, 12), (512, 20), (2048, 28), (8192, 36):
        menu = _menu(128, most_tokens)
        planned = menu.planned(1, 1 << 20, most_tokens)
        assert len({shape.rows * shape.tokens for shape in planned if not shape.is_alone}) == numbers
    # A limit that no step has adds the multiples of it by one to four, five, six, seven, eight, ...
    planned = _menu(77, 512).planned(1, 1 << 20, 512)
    assert {shape.rows for shape in planned if shape.tokens == 77} == {1, 2, 3, 4, 5, 6}


def test_every_shape_that_a_batch_may_have_is_planned_once_for_each_core_and_those_with_few_tokens_first(
    limits: tuple[int, int],
) -> None:
    menu, generator = _menu(*limits), random.Random(str(limits))
    cores, max_rows, max_batch_tokens = generator.randint(1, 4), generator.randint(1, 64), limits[1]
    planned = menu.planned(cores, max_rows, max_batch_tokens)
    may_be = {
        BatchShape(core, menu.rows_within(rows, length), length, is_alone=False)
        for length in map(menu.round_tokens, range(1, limits[0] + 1))
        for rows in range(1, max_rows + 1)
        for core in range(cores)
    } | {
        BatchShape(0, 1, menu.round_tokens(tokens), is_alone=True)  # by the threads of all cores
        for tokens in range(1, limits[0] + 1)
    }
    assert set(planned) == may_be
    assert len(planned) == len(may_be)
    tokens = [shape.rows * shape.tokens for shape in planned]
    assert tokens == sorted(tokens)


def test_images_have_one_length() -> None:
    spec = image_spec(image=ImageSpec(resize=(224, 224)), max_tokens=196)  # 14 x 14 patches
    menu = ShapeMenu(spec, 4 * 196)
    assert menu.lengths == [196]
    assert {(shape.rows, shape.tokens) for shape in menu.planned(1, 8, 1000)} == {(rows, 196) for rows in (1, 2, 3, 4)}


def test_images_beside_texts_have_a_length_that_no_text_has_and_share_no_batch_with_one() -> None:
    for max_tokens in 4, 16, 77:  # an image has 6 patches
        spec = image_text_spec(max_tokens=max_tokens)
        menu, image = ShapeMenu(spec, 512), max(6, max_tokens + 1)
        assert spec.image_length == menu.round_tokens(image) == image
        for length in map(menu.round_tokens, range(1, max_tokens + 1)):
            assert length < image
            assert not menu.can_share_batch(length, image)
            assert not menu.can_share_batch(image, length)
            assert menu.can_share_batch(length, max_tokens)
        assert menu.can_share_batch(image, image)
        found = {shape.rows for shape in menu.planned(1, 8, 512) if shape.tokens == image}
        assert found == {rows for rows in range(1, 9) if rows * image <= 512}
