"""compiler/accuracy.py: agreement and the limits on it, with numbers that can be checked by hand; which texts of a file
are taken for what, and which files are refused.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronpipe.bundles.manifest import Accuracy, Calibration
from neuronpipe.compiler import accuracy
from neuronpipe.compiler.accuracy import (
    MAX_COMPARED,
    MAX_TEXTS,
    MIN_TEXTS,
    agreement,
    built_in_calibration,
    read_calibration,
    sentences,
)
from neuronpipe.core.errors import SetupError


def _batch(*lengths: int) -> dict[str, Any]:
    mask = np.array([[1] * length + [0] * (max(lengths) - length) for length in lengths], np.int64)
    return {"input_ids": mask, "attention_mask": mask}


def _array(*rows: list[float]) -> Any:
    return np.array(rows, np.float32)


def test_labels_agree_where_the_best_is_the_same() -> None:
    outputs = [{"logits": _array([1, 5, 2], [3, 2, 1])}, {"logits": _array([-1, -2, -3], [0, 1, 9])}]
    reference = [{"logits": _array([0, 1, 0], [2, 3, 1])}, {"logits": _array([9, 8, 7], [1, 2, 3])}]
    # Best labels 1 0 | 0 2 against 1 1 | 0 2: three of four.
    assert agreement("text_classification", outputs, reference, [_batch(2, 2), _batch(2, 2)]) == 0.75


def test_every_text_counts_the_same_whatever_its_batch() -> None:
    outputs = [{"logits": _array([1, 0])}, {"logits": _array([1, 0], [1, 0], [1, 0])}]
    reference = [{"logits": _array([0, 1])}, {"logits": _array([1, 0], [1, 0], [1, 0])}]
    # Three of four texts; the mean of the batches' means would be one half.
    assert agreement("text_classification", outputs, reference, [_batch(1), _batch(1, 1, 1)]) == 0.75


def test_model_with_one_label_has_no_agreement() -> None:
    outputs = [{"logits": _array([1], [2])}]
    assert agreement("text_classification", outputs, outputs, [_batch(1, 1)]) is None


def test_answers_agree_where_both_start_and_end_are_the_same() -> None:
    starts, ends = (
        _array([0, 9, 1], [0, 9, 1], [0, 9, 1], [5, 9, 1]),
        _array([0, 1, 9], [0, 1, 9], [0, 1, 9], [0, 1, 9]),
    )
    expected_starts, expected_ends = (
        _array([0, 2, 1], [3, 2, 1], [0, 2, 1], [3, 2, 1]),
        _array([0, 1, 2], [0, 1, 2], [3, 1, 2], [3, 1, 2]),
    )
    # Starts 1 1 1 1 against 1 0 1 0, ends 2 2 2 2 against 2 2 0 0: both are the same in the first text only.
    outputs = [{"start_logits": starts, "end_logits": ends}]
    reference = [{"start_logits": expected_starts, "end_logits": expected_ends}]
    assert agreement("question_answering", outputs, reference, [_batch(3, 3, 3, 3)]) == 0.25


def test_answers_in_the_padding_do_not_count() -> None:
    outputs = [{"start_logits": _array([0, 1, 9], [0, 1, 9]), "end_logits": _array([0, 1, 9], [0, 1, 9])}]
    reference = [{"start_logits": _array([0, 1, 0], [0, 1, 9]), "end_logits": _array([0, 1, 0], [0, 1, 9])}]
    assert agreement("question_answering", outputs, reference, [_batch(2, 3)]) == 1


def test_embeddings_agree_as_much_as_the_worst_does_whatever_their_lengths() -> None:
    outputs = [{"sentence_embedding": _array([2, 0], [3, 4])}, {"sentence_embedding": _array([5, 5])}]
    reference = [{"sentence_embedding": _array([7, 0], [1, 0])}, {"sentence_embedding": _array([1, 1])}]
    # Cosines: 1; 3 / 5; 1.
    found = agreement("sentence_embedding", outputs, reference, [_batch(1, 1), _batch(1)])
    assert found == pytest.approx(0.6, abs=1e-12)


@pytest.mark.parametrize("vector", [[-1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], ids=["opposite", "unrelated", "zero"])
def test_embeddings_that_have_nothing_in_common_agree_by_zero(vector: list[float]) -> None:
    outputs = [{"sentence_embedding": _array(vector)}]
    assert agreement("sentence_embedding", outputs, [{"sentence_embedding": _array([1, 0])}], [_batch(1)]) == 0


def _measured(**changes: Any) -> Accuracy:
    described: dict[str, Any] = {
        "samples": 4,
        "sample_shapes": ((4, 3),),
        "largest_output": 1.0,
        "largest_difference": 0.25,
        "computed_dtype": "int8",
        "agreement": 0.75,
    }
    return Accuracy(**described | changes)


def test_artefact_at_its_limits_is_kept() -> None:
    accuracy.check(_measured(), max_divergence=0.25, min_agreement=0.75)
    accuracy.check(_measured(), None, None)
    accuracy.check(None, None, None)


@pytest.mark.parametrize(
    ("measured", "limits", "message"),
    [
        (
            _measured(),
            (0.2, None),
            r"differs from PyTorch float32 by 2.50e-01, the limit is 2.00e-01 \(--max-divergence\)",
        ),
        (_measured(), (None, 0.8), r"agreement with PyTorch float32 is 0.75, the limit is 0.8 \(--min-agreement\)"),
        (_measured(emulated_agreement=0.5), (None, 0.75), "is 0.5, the limit is 0.75"),
        (_measured(emulated_difference=0.5), (0.25, None), "by 5.00e-01, the limit is 2.50e-01"),
        (_measured(agreement=None), (None, 0.5), "a model with one label has no agreement"),
        (_measured(largest_difference=float("nan")), (None, None), "are NaN or infinite"),
        (_measured(emulated_difference=float("nan")), (None, None), "are NaN or infinite"),
        (None, (1.0, None), "not compared with PyTorch; leave out --max-divergence"),
        (None, (None, 0.1), "not compared with PyTorch; leave out --max-divergence"),
    ],
)
def test_artefact_beyond_a_limit_is_refused_with_both_numbers(
    measured: Accuracy | None, limits: tuple[float | None, float | None], message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        accuracy.check(measured, *limits)


_ENOUGH = [f"text {number}" for number in range(MIN_TEXTS)]


def _file(folder: Path, content: bytes) -> Path:
    path = folder / "texts.txt"
    path.write_bytes(content)
    return path


def _lines(*texts: str) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def test_each_line_is_a_text_and_the_file_is_known_by_its_digest(tmp_path: Path) -> None:
    path = _file(tmp_path, _lines(*_ENOUGH))
    read = read_calibration(path)
    assert (read.texts, read.compared) == (_ENOUGH[::2], _ENOUGH[1::2])
    assert read.description.texts == MIN_TEXTS / 2
    assert read.description.source == str(path)
    assert read.description.source_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_byte_order_mark_line_ends_and_empty_lines_are_no_text(tmp_path: Path) -> None:
    path = _file(tmp_path, b"\xef\xbb\xbf\r\n" + b"\r\n \t\r\n".join(text.encode() for text in _ENOUGH))
    assert read_calibration(path).texts == _ENOUGH[::2]


def test_only_a_line_feed_ends_a_text(tmp_path: Path) -> None:
    odd = "a\u2028b\u0085c\x0cd"  # where str.splitlines would cut
    assert read_calibration(_file(tmp_path, _lines(odd, *_ENOUGH))).texts == [odd, *_ENOUGH[1::2]]


def test_of_many_texts_some_are_taken_from_the_whole_file(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(8 * MAX_TEXTS)]
    read = read_calibration(_file(tmp_path, _lines(*texts)))
    assert read.texts == texts[::8]
    assert read.description.texts == MAX_TEXTS
    assert len(read.compared) == MAX_COMPARED
    assert read.compared[0] == texts[1]
    assert int(str(read.compared[-1]).removeprefix("text ")) > 7.9 * MAX_TEXTS


def test_without_a_file_there_are_different_texts_of_our_own_half_of_them_in_other_languages() -> None:
    read = built_in_calibration(of_images=False)
    assert MIN_TEXTS < len(set(read.texts)) == len(read.texts) == read.description.texts
    others = [
        text
        for text in read.texts
        if any(str(text).startswith(tuple(sentence[::2])) for sentence in sentences().values())
    ]
    assert 2 * len(others) >= len(read.texts)
    assert read.description.source == f"built-in sample text in {len(sentences()) + 1} languages"
    assert read.description.source_sha256 is None
    assert read.compared == ()


def test_every_language_has_the_same_sentences_of_its_own() -> None:
    assert len(sentences()) >= 15
    assert {len(sentence) for sentence in sentences().values()} == {6}
    every = [sentence for of_language in sentences().values() for sentence in of_language]
    assert len(set(every)) == len(every)
    # The third and the last are the shortest and one of the longest, which calibration and comparison share.
    assert all(len(sentence[2]) < len(sentence[0]) < len(sentence[5]) for sentence in sentences().values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "texts.txt: 0 different texts, one a line; calibration takes at least 64"),
        (b"\n \n\n", "texts.txt: 0 different texts"),
        (_lines(*_ENOUGH[1:]), "texts.txt: 63 different texts"),
        (_lines(*["the same"] * 1000), "texts.txt: 1 different texts"),
        (_lines(*_ENOUGH, "caf\u00e9") + b"caf\xe9\n", "texts.txt: line 66 is not UTF-8"),
        ("\n".join(_ENOUGH).encode("utf-16"), "texts.txt: line 1 is not UTF-8"),
    ],
    ids=["empty", "blank", "too few", "one text", "latin-1", "utf-16"],
)
def test_file_that_cannot_calibrate_is_refused_by_line_or_limit(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        read_calibration(_file(tmp_path, content))


def test_what_is_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(SetupError, match=f"^--calibration {path}: No such file or directory$"):
        read_calibration(path)


def test_every_second_image_of_a_folder_is_compared_on_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "further").mkdir()
    names = [*(f"{number:02}.png" for number in range(MIN_TEXTS - 2)), "90.JPG", "further/91.webp"]
    for name in (*names, "notes.txt"):
        (tmp_path / name).write_bytes(b"not read yet")
    read = read_calibration(tmp_path)
    ordered = sorted(tmp_path / name for name in names)
    assert (read.texts, read.compared) == (ordered[::2], ordered[1::2])
    assert read.description == Calibration(texts=MIN_TEXTS // 2, source=str(tmp_path))


def test_a_folder_of_too_few_images_is_refused_with_what_counts_as_one(tmp_path: Path) -> None:
    (tmp_path / "one.png").touch()
    with pytest.raises(SetupError, match=r"1 images \(\.jpeg, \.jpg, \.png, \.webp\); calibration takes at least 64"):
        read_calibration(tmp_path)


def test_file_without_an_end_is_refused_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_MAX_BYTES", 1024 * 1024)
    with pytest.raises(SetupError, match="/dev/zero: more than 1,048,576 bytes"):
        read_calibration(Path("/dev/zero"))
