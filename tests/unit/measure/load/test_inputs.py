"""measure/load/inputs.py: requests for each task, prompts of wanted lengths, the built-in texts, and files."""

from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from demo.model import find_minilm
from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import Truncation
from neuronpipe.core.errors import SetupError
from neuronpipe.measure.load import inputs
from neuronpipe.measure.load.inputs import (
    PromptMaker,
    Words,
    builtin_texts,
    check_task,
    generation_requests,
    make_requests,
    read_texts,
)
from neuronpipe.measure.load.request import GenerationLoad, Lengths, LoadRequest
from neuronpipe.tasks import TASKS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(find_minilm() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def test_builtin_texts_have_the_length_that_is_promised(tokenizer: Tokenizer) -> None:
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(builtin_texts(0))]
    # 32.8 and 126 under Python 3.11; other versions have slightly other texts.
    assert 29 <= sum(lengths) / len(lengths) <= 37
    assert max(lengths) <= 140
    assert min(lengths) >= 4


def test_builtin_texts_are_many_and_different() -> None:
    found = builtin_texts(0)
    assert len(found) == len(set(found)) > 1000


def test_builtin_texts_are_single_lines_of_prose() -> None:
    assert [text for text in builtin_texts(0) if "\n" in text or "  " in text or "====" in text or "::=" in text] == []


def test_equal_seeds_give_equal_texts_and_different_ones_do_not() -> None:
    assert builtin_texts(3) == builtin_texts(3)
    assert builtin_texts(3) != builtin_texts(4)


def test_builtin_texts_are_shuffled() -> None:
    # The first hundred of 1,800 have about six in common by chance, and nearly all where both keep the order of their
    # source.
    assert len(set(builtin_texts(3)[:100]) & set(builtin_texts(4)[:100])) < 30


def test_a_file_holds_a_text_a_line(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_bytes("\ufeffeins\r\n\n  zwei Wörter \n\t\n三".encode())
    assert read_texts(file) == ["eins", "zwei Wörter", "三"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has no text"),
        (b" \n\n\t\n", "has no text"),
        (b"a\nb\nab\xff\n", "line 3 is not UTF-8 (byte 3 of the line)"),
        (b"\xe9t\xe9", "line 1 is not UTF-8 (byte 1 of the line)"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "texts"
    file.write_bytes(content)
    with pytest.raises(SetupError) as caught:
        read_texts(file)
    assert str(caught.value) == f"--texts {file}: {problem}"


@pytest.mark.parametrize(("name", "problem"), [("none", "No such file or directory"), (".", "Is a directory")])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(SetupError, match=f"--texts {tmp_path / name}: {problem}"):
        read_texts(tmp_path / name)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_MAX_FILE_BYTES", 3)
    file = tmp_path / "texts"
    file.write_text("four")
    with pytest.raises(SetupError, match="more than 3 bytes, the limit of such a file"):
        read_texts(file)


_TOKENS = {"a": 1, "of": 1, "longer": 2, "tokenizer": 4}
_WORDS = Words([*_TOKENS], [*_TOKENS.values()])


def test_a_prompt_has_as_many_tokens_as_it_should() -> None:
    maker = PromptMaker(_WORDS, (0,))
    for tokens in (1, 2, 17, 500):
        assert sum(_TOKENS[word] for word in maker.make(tokens).split()) == tokens


def test_words_of_several_tokens_alone_make_a_prompt_that_is_a_little_short() -> None:
    maker = PromptMaker(Words(["longer", "tokenizer"], [2, 4]), (0,))
    assert sum(_TOKENS[word] for word in maker.make(9).split()) == 8


def test_prompts_differ_and_the_same_seed_makes_the_same_ones() -> None:
    first, again, other = (PromptMaker(_WORDS, seed) for seed in ((0, 0), (0, 0), (0, 1)))
    made = [first.make(40) for _ in range(20)]
    assert len(set(made)) == 20
    assert made == [again.make(40) for _ in range(20)]
    assert not {other.make(40) for _ in range(20)} & set(made)


_REQUEST = LoadRequest(target="h:1", model="m", version="2")


@pytest.mark.parametrize("task", ["text_classification", "sentence_embedding"])
def test_a_text_is_truncated_on_the_right_where_it_is_too_long(task: str) -> None:
    (made,) = make_requests(_REQUEST, task, ["A text."])
    input = getattr(made.input, task)
    assert made.input.WhichOneof("task") == task
    assert (input.text, input.truncation) == ("A text.", Truncation.TRUNCATION_RIGHT)


def test_a_question_is_asked_of_the_text() -> None:
    (made,) = make_requests(_REQUEST, "question_answering", ["A text."])
    assert made.input.question_answering.context == "A text."
    assert made.input.question_answering.question


@pytest.mark.parametrize(("task", "field"), [("sentence_similarity", "texts"), ("rerank", "texts")])
def test_a_text_is_one_of_the_many_that_a_task_takes(task: str, field: str) -> None:
    (made,) = make_requests(_REQUEST, task, ["A text."])
    assert list(getattr(getattr(made.input, task), field)) == ["A text."]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_of_a_model_is_known(task: str) -> None:
    assert make_requests(_REQUEST, task, ["A text."])[0].input.WhichOneof("task") == task


def test_every_request_names_the_model_and_its_version() -> None:
    made = make_requests(_REQUEST, "sentence_embedding", ["a", "b"])
    expected = [("m", "2", "a"), ("m", "2", "b")]
    assert [(request.model, request.version, request.input.sentence_embedding.text) for request in made] == expected


@pytest.mark.parametrize(
    ("priority", "expected"),
    [
        (None, Priority.PRIORITY_UNSPECIFIED),
        ("interactive", Priority.PRIORITY_INTERACTIVE),
        ("bulk", Priority.PRIORITY_BULK),
    ],
)
def test_priority_is_passed_on(priority: str | None, expected: "Priority.ValueType") -> None:
    made: InferRequest
    (made,) = make_requests(LoadRequest(target="h:1", model="m", priority=priority), "sentence_embedding", ["a"])
    assert made.priority == expected


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(SetupError, match="--model m: has the task speech; load is generated for text_classification, "):
        check_task(_REQUEST, "speech")


def _prompts(load: GenerationLoad, words: Words | None) -> list[InferRequest]:
    return list(
        islice(generation_requests(_REQUEST, load, "text_generation", ["A text.", "Another."], words, (0, 0)), 3)
    )


def test_texts_are_prompts_again_and_again_where_no_length_is_given() -> None:
    made = [prompt.input.text_generation for prompt in _prompts(GenerationLoad(), None)]
    assert [input.prompt for input in made] == ["A text.", "Another.", "A text."]
    options = [(input.options.max_new_tokens, input.options.min_new_tokens, input.options.num_beams) for input in made]
    assert set(options) == {(32, 32, 1)}


def test_prompts_of_a_length_share_what_they_shall_share() -> None:
    words = Words([f"word{number}" for number in range(1000)], [1] * 1000)
    load = GenerationLoad(prompt_tokens=Lengths.fixed(20), shared_prefix_tokens=10)
    made = [prompt.input.text_generation.prompt.split() for prompt in _prompts(load, words)]
    assert [len(prompt) for prompt in made] == [30] * 3
    assert made[0][:10] == made[1][:10] == made[2][:10]
    assert len({tuple(prompt[10:]) for prompt in made}) == 3


@pytest.mark.parametrize("task", ["summarization", "translation"])
def test_the_text_is_what_is_summarized_or_translated(task: str) -> None:
    made = next(generation_requests(_REQUEST, GenerationLoad(num_beams=4), task, ["A text."], None, (0,)))
    input = getattr(made.input, task)
    assert (input.text, input.options.num_beams) == ("A text.", 4)


def test_a_task_that_does_not_generate_is_named() -> None:
    with pytest.raises(SetupError, match="--generate: model m has the task rerank; it is for text_generation, "):
        check_task(LoadRequest(target="h:1", model="m", generation=GenerationLoad()), "rerank")
