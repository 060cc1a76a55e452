"""tasks/question_answering.py: windows in, passages out.

Logits are logarithms of small whole numbers, so that a probability is a number's share of their sum.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import QuestionAnsweringInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.tensors import Arrays
from neuronpipe.tasks.base import Encoded
from neuronpipe.tasks.question_answering import TASK, decode
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import CLS, SEP, WordTokenizer, encode_checked

_MODEL = model_spec("question_answering", max_tokens=10)
# On tokens where no answer can be: so large that they would win everything if they were let in.
_POISON = 60.0


def _window(starts: Sequence[int], *, cls: bool = True) -> Arrays:
    """The annotations of [CLS] question [SEP] words [SEP], where each word has two characters and begins at one of
    `starts`.
    """
    first = 0 if cls else -1
    return {
        "char_start": np.array([first, -1, -1, *starts, -1], np.int32),
        "char_end": np.array([first, -1, -1, *(start + 2 for start in starts), -1], np.int32),
    }


def _logits(start: Sequence[float], end: Sequence[float]) -> Arrays:
    """Logits of [CLS] and the words from weights; all other tokens are poisoned."""

    def logits(weights: Sequence[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        cls, *words = (math.log(weight) if weight else -200.0 for weight in weights)
        return np.array([cls, _POISON, _POISON, *words, _POISON], np.float32)

    return {"start_logits": logits(start), "end_logits": logits(end)}


def _answers(input: QuestionAnsweringInput, *windows: tuple[Arrays, Arrays]) -> list[tuple[str, object, int, int]]:
    result = decode(input, _MODEL, [annotation for annotation, _ in windows], [output for _, output in windows])
    # Products of two float32 probabilities: 1e-6 is a few of their last places.
    return [(answer.text, pytest.approx(answer.score, abs=1e-6), answer.start, answer.end) for answer in result.answers]


# Context "ab cd ef". Weights of [CLS], ab, cd, ef; each sums to ten.
_ONE_WINDOW = (_window([0, 3, 6]), _logits([1, 1, 6, 2], [1, 1, 3, 5]))


def _ask(**changes: object) -> QuestionAnsweringInput:
    input = QuestionAnsweringInput(question="q", context="ab cd ef")
    for field, value in changes.items():
        setattr(input, field, value)
    return input


@pytest.mark.parametrize(
    ("asked", "expected"),
    # cd..ef 0.6 x 0.5, cd 0.6 x 0.3, ef 0.2 x 0.5, ab..ef 0.1 x 0.5.
    [
        ({}, [("cd ef", 0.30, 3, 8)]),
        ({"top_k": 4}, [("cd ef", 0.30, 3, 8), ("cd", 0.18, 3, 5), ("ef", 0.10, 6, 8), ("ab cd ef", 0.05, 0, 8)]),
        ({"max_answer_tokens": 1}, [("cd", 0.18, 3, 5)]),
    ],
    ids=["one", "best first", "length"],
)
def test_answers_are_the_passages_of_the_most_probable_starts_and_ends(
    asked: dict[str, object], expected: list[tuple[str, float, int, int]]
) -> None:
    assert _answers(_ask(**asked), _ONE_WINDOW) == expected


def test_an_answer_never_ends_before_it_starts() -> None:
    # ef..ab would have 0.8 x 0.8; what can be read forwards: ab 0.1 x 0.8 before ef 0.8 x 0.05.
    window = (_window([0, 3, 6]), _logits([1, 2, 1, 16], [1, 16, 2, 1]))
    assert _answers(_ask(), window) == [("ab", 0.08, 0, 2)]


def test_an_answer_has_at_most_fifteen_tokens_unless_asked() -> None:
    context = " ".join(["ab"] * 16)
    starts = [3 * word for word in range(16)]
    ends_far = [1, *[0] * 14, 1, 98]  # the last word, sixteen tokens from the first, is the likeliest end
    window = (_window(starts), _logits([1, 99, *[0] * 15], ends_far))
    # First to fifteenth word: 0.99 x 0.01.
    assert _answers(_ask(context=context), window) == [(context[:44], 0.0099, 0, 44)]


def test_equal_passages_of_two_windows_add_up() -> None:
    # Both windows see "cd" alone at the same place: 0.5 x 0.8 and 0.4 x 0.5.
    first = (_window([0, 3]), _logits([1, 4, 5], [1, 1, 8]))
    second = (_window([3, 6]), _logits([5, 4, 1], [4, 5, 1]))
    assert _answers(_ask(), first, second) == [("cd", 0.40 + 0.20, 3, 5)]


def test_passages_that_differ_in_case_only_are_one_answer_at_the_first_ones_place() -> None:
    first = (_window([0]), _logits([1, 3], [2, 2]))  # 3/4 x 1/2
    second = (_window([3]), _logits([1, 1], [1, 3]))  # 1/2 x 3/4
    assert _answers(_ask(context="Cd cD", top_k=2), first, second) == [("Cd", 0.75, 0, 2)]


def test_windows_compete() -> None:
    first = (_window([0]), _logits([1, 1], [1, 1]))  # 1/2 x 1/2
    second = (_window([3]), _logits([1, 9], [1, 9]))  # 9/10 x 9/10
    assert _answers(_ask(top_k=2), first, second) == [("cd", 0.81, 3, 5), ("ab", 0.25, 0, 2)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    # [CLS] has 0.9 x 0.9.
    [({"allow_no_answer": True}, ("", 0.81, 0, 0)), ({"top_k": 5}, ("ab", 0.01, 0, 2))],
    ids=["where it may", "only where it may"],
)
def test_no_answer_wins_where_it_may_and_is_more_probable(
    asked: dict[str, object], expected: tuple[str, float, int, int]
) -> None:
    assert _answers(_ask(**asked), (_window([0]), _logits([9, 1], [9, 1]))) == [expected]


@pytest.mark.parametrize("step", [1, -1])
def test_no_answer_is_as_probable_as_in_the_window_that_believes_in_it_least(step: int) -> None:
    sure = (_window([0]), _logits([9, 1], [9, 1]))
    unsure = (_window([3]), _logits([1, 1], [1, 1]))  # 1/2 x 1/2
    assert ("", 0.25, 0, 0) in _answers(_ask(allow_no_answer=True, top_k=3), *(sure, unsure)[::step])


def test_where_the_model_has_no_cls_token_the_words_have_all_the_probability() -> None:
    window = (_window([0, 3], cls=False), _logits([100, 1, 3], [100, 1, 3]))
    assert _answers(_ask(), window) == [("cd", 9 / 16, 3, 5)]


def test_passages_of_probability_zero_are_left_out() -> None:
    # e^-200 is zero in float32.
    window = (_window([0, 3]), _logits([1, 1, 0], [1, 1, 0]))
    assert _answers(_ask(top_k=10), window) == [("ab", 0.25, 0, 2)]


def test_giant_logits_do_not_overflow() -> None:
    # float32 exp overflows from 89 on; the warning that it gives fails this test.
    annotation, output = _ONE_WINDOW
    raised = {name: logits + 1000 for name, logits in output.items()}
    # Raised by the same amount, logits have the same shares; near 1000 float32 has steps of 6e-5, so 3e-4 is a few of
    # them.
    (answer,) = decode(_ask(), _MODEL, [annotation], [raised]).answers
    assert answer.text == "cd ef"
    assert answer.score == pytest.approx(0.30, rel=3e-4)


def test_places_count_code_points_beyond_the_basic_plane_as_one() -> None:
    # "😀😀 ab": two code points, in UTF-16 four and in UTF-8 eight units.
    window = (_window([3]), _logits([1, 9], [1, 9]))
    assert _answers(_ask(context="😀😀 ab"), window) == [("ab", 0.81, 3, 5)]


def test_an_output_for_every_window_is_demanded() -> None:
    annotation, output = _ONE_WINDOW
    with pytest.raises(ValueError, match="zip"):
        decode(_ask(), _MODEL, [annotation, annotation], [output])


def _encoded(
    tokenizer: WordTokenizer, context: str, *, max_tokens: int = 10, question: str = "q r", stride: int = 0
) -> Encoded:
    input = QuestionAnsweringInput(question=question, context=context, window_stride_tokens=stride)
    return encode_checked(TASK, input, tokenizer, model_spec("question_answering", max_tokens=max_tokens))


def test_a_short_context_is_one_window_behind_the_question_and_cls_stands_for_no_answer() -> None:
    tokenizer = WordTokenizer()
    encoded = _encoded(tokenizer, "ab cd")
    (sequence,), (annotation,) = encoded.sequences, encoded.annotations
    assert sequence["input_ids"].tolist() == [CLS, *tokenizer.ids("q r"), SEP, *tokenizer.ids("ab cd"), SEP]
    assert sequence["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert annotation["char_start"].tolist() == [0, -1, -1, -1, 0, 3, -1]
    assert annotation["char_end"].tolist() == [0, -1, -1, -1, 2, 5, -1]


def test_without_a_cls_token_no_token_stands_for_no_answer() -> None:
    input = QuestionAnsweringInput(question="q", context="ab")
    model = model_spec("question_answering", cls_token_id=None)
    (annotation,) = encode_checked(TASK, input, WordTokenizer(), model).annotations
    assert annotation["char_start"].tolist() == [-1, -1, -1, 0, -1]


@pytest.mark.parametrize(
    ("question", "context"), [("[CLS] q", "ab cd"), ("q r", "[CLS] cd")], ids=["question", "context"]
)
def test_the_text_of_the_cls_token_stands_for_itself(question: str, context: str) -> None:
    (annotation,) = _encoded(WordTokenizer(), context, question=question).annotations
    first, last = context.split()
    assert annotation["char_start"].tolist() == [0, -1, -1, -1, 0, len(first) + 1, -1]
    assert annotation["char_end"].tolist() == [0, -1, -1, -1, len(first), len(first) + 1 + len(last), -1]


def _context_words(
    encoded: Encoded, tokenizer: WordTokenizer, words: list[str], question_tokens: int
) -> list[list[str]]:
    by_id = {tokenizer.ids(word)[0]: word for word in words}
    return [
        [by_id[token] for token in sequence["input_ids"].tolist()[question_tokens + 2 : -1]]
        for sequence in encoded.sequences
    ]


@pytest.mark.parametrize(
    ("stride", "windows"),
    # Ten tokens a window less two of the question and three special ones leave five; two new ones a step. Half a
    # window is five tokens, as many as there is room for; half of the room is two, so three new ones a step.
    [(3, ["abcde", "cdefg", "efghi", "ghij"]), (0, ["abcde", "defgh", "ghij"])],
    ids=["as asked for", "half of the room"],
)
def test_windows_overlap_as_asked_for_or_by_half_of_the_room(stride: int, windows: list[str]) -> None:
    tokenizer, words = WordTokenizer(), list("abcdefghij")
    encoded = _encoded(tokenizer, " ".join(words), stride=stride)
    assert _context_words(encoded, tokenizer, words, 2) == [list(window) for window in windows]


def test_windows_have_384_tokens_and_overlap_by_128_where_the_model_takes_more() -> None:
    # transformers 4.57.6, pipelines/question_answering.py: max_seq_len = min(model_max_length, 384), doc_stride =
    # min(that // 2, 128).
    tokenizer, words = WordTokenizer(), [f"w{number}" for number in range(500)]
    parts = _context_words(_encoded(tokenizer, " ".join(words), max_tokens=512, question="q"), tokenizer, words, 1)
    # 384 less the question and three special tokens leave 380, of which 252 are new in the second window.
    assert [(part[0], part[-1]) for part in parts] == [("w0", "w379"), ("w252", "w499")]


def test_a_question_that_leaves_room_for_one_token_is_taken() -> None:
    assert len(_encoded(WordTokenizer(), "ab cd ef", question="a b c d e f").sequences) == 3


@pytest.mark.parametrize(
    ("question", "stride", "problem"),
    [
        ("a b c d e f g", 0, "question: 7 tokens leave no room for the context in a window of 10$"),
        ("q r", 5, "window_stride_tokens: 5, must be less than 5, the tokens of the context"),
    ],
    ids=["question", "overlap"],
)
def test_what_leaves_no_way_forward_is_refused_with_both_lengths(question: str, stride: int, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{problem}"):
        _encoded(WordTokenizer(), "ab", question=question, stride=stride)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"question": ""}, "question: is empty"),
        ({"context": ""}, "context: is empty"),
        ({"question": "a\0"}, "question: has the character NUL at position 1"),
        ({"context": "\0"}, "context: has the character NUL at position 0"),
        ({"top_k": 101}, "top_k: 101, the limit is 100"),
        ({"max_answer_tokens": 513}, "max_answer_tokens: 513, the limit is 512"),
    ],
    ids=str,
)
def test_a_bad_input_is_refused_by_its_fields_name(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_checked(TASK, _ask(**changes), WordTokenizer(), _MODEL)
    assert caught.value.message == expected


@pytest.mark.parametrize(("allow_no_answer", "scores"), [(False, []), (True, [1.0])])
def test_a_blank_context_answers_nothing(allow_no_answer: bool, scores: list[float]) -> None:
    input = _ask(context=" \n\t", allow_no_answer=allow_no_answer)
    encoded = encode_checked(TASK, input, WordTokenizer(), _MODEL)
    tokens = len(encoded.sequences[0]["input_ids"])
    outputs = [{name: np.arange(tokens, dtype=np.float32) for name in ("start_logits", "end_logits")}]
    assert [answer.score for answer in decode(input, _MODEL, encoded.annotations, outputs).answers] == scores


@pytest.mark.parametrize("changes", [{"top_k": 100}, {"max_answer_tokens": 512}], ids=str)
def test_the_limits_themselves_are_allowed(changes: dict[str, object]) -> None:
    assert len(encode_checked(TASK, _ask(**changes), WordTokenizer(), _MODEL).sequences) == 1
