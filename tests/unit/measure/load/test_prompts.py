"""prompts.py: prompts have the wanted number of tokens, and do not repeat."""

from neuronpipe.measure.load.prompts import PromptMaker, Words

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
