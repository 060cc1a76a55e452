"""What a generation_config says has the effect that it has in transformers' `generate`, greedy and with beams."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.compiler.tasks.texts import generation_facts
from neuronpipe.core.errors import InvalidInput
from neuronpipe.stages.neuron_executor.generation.beams import BeamSearch
from neuronpipe.stages.neuron_executor.generation.logit_rules import LogitRules
from neuronpipe.stages.neuron_executor.generation.sampling import TokenChooser
from neuronpipe.tasks.text_options import GenerationFacts, complete_options
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.generation.written_decoder import written_scores

_VOCABULARY, _TOPS, _END = 60, 24, 2
_SIZES: dict[str, Any] = {"vocab_size": _VOCABULARY, "eos_token_id": _END, "pad_token_id": 1, "bos_token_id": 0}


def _decoder() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, **_SIZES
        )
    )


def _encoder_decoder() -> Any:
    layers = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**layers, **widths, decoder_start_token_id=2, forced_eos_token_id=None, **_SIZES)
    )


@pytest.fixture(scope="module", params=[_decoder, _encoder_decoder], ids=["decoder", "encoder-decoder"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as fast alone, and much faster beside other tests
    torch.manual_seed(3)
    model = request.param().float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    yield model
    torch.set_num_threads(threads)


def _generated(model: Any, settings: dict[str, Any], prompt: list[int], num_beams: int, new_tokens: int) -> list[int]:
    """What the executor chooses, over the scores of PyTorch."""
    start = [2] if model.config.is_encoder_decoder else []
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=_END, pad_token_id=1, decoder_start_token_id=2, **settings
    )
    facts = generation_facts(Path("source"), model, GenerationFacts)
    spec = model_spec("text_generation", vocabulary_size=_VOCABULARY, facts={"text_generation": facts})
    given = GenerationOptions(max_new_tokens=new_tokens, num_beams=num_beams)
    options, text = complete_options(given, spec, len(prompt)), start or prompt
    begin = len(text)
    if num_beams == 1:
        chooser, whole = TokenChooser(LogitRules(options, begin, facts.end_token_ids, facts, prompt)), [*text]
        while len(whole) - begin < new_tokens and (len(whole) == begin or whole[-1] != _END):
            whole.append(chooser.choose(whole, _scores(model, start and prompt, [whole])))
        return whole[begin:]
    search, texts = BeamSearch(LogitRules(options, begin, facts.end_token_ids, facts, prompt)), [[*text]]
    while steps := search.advance(texts, _scores(model, start and prompt, texts)):
        texts = [[*texts[step.parent], step.token_id] for step in steps]
    return search.best[0].token_ids[begin:]


def _scores(model: Any, source: list[int], texts: list[list[int]]) -> Any:
    given = {"input_ids": torch.tensor([source] * len(texts))} if source else {}
    with torch.inference_mode():
        logits = model(**given, **{"decoder_input_ids" if source else "input_ids": torch.tensor(texts)}).logits[:, -1]
    return written_scores(logits.numpy(), np.argsort(-logits.numpy(), kind="stable")[:, :_TOPS].astype(np.int32))


_SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "suppress_tokens": {"suppress_tokens": [*range(5, 40), 900]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(5, 55))},
    "begin_suppress_tokens after a forced one": {"begin_suppress_tokens": list(range(55)), "forced_bos_token_id": 7},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size of 2": {"encoder_no_repeat_ngram_size": 2},
    "sequence_bias": {
        "sequence_bias": [[[number], 9.0 - number] for number in range(3, 20)]
        + [[[number, 8], 30.0] for number in range(3, 20)],
        "repetition_penalty": 1.4,
    },
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.5)},
    "renormalize_logits": {"renormalize_logits": True, "bad_words_ids": [[number] for number in range(5, 30)]},
    "renormalize_logits of the best": {"renormalize_logits": True, "bad_words_ids": [[5], [6], [7]]},
}

# With these some texts may be as they are without.
_SUBTLE = ("nothing", "renormalize_logits of the best")


@pytest.mark.sampled
@pytest.mark.parametrize("name", _SETTINGS)
def test_settings_of_a_model_have_the_effect_that_they_have_in_generate(model: Any, name: str) -> None:
    chosen, different = np.random.default_rng(len(name)), 0
    for length, num_beams in itertools.product((1, 2, 400), (1, 3)):
        prompt = [int(integer) for integer in chosen.integers(3, _VOCABULARY, length)]
        found = _generated(model, _SETTINGS[name], prompt, num_beams, 14)
        given = torch.tensor([prompt])
        with torch.inference_mode():
            expected = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=14, num_beams=num_beams
            )[0].tolist()
        assert found == expected[1 if model.config.is_encoder_decoder else length :]
        different += found != _generated(model, {}, prompt, num_beams, 14)
    assert different or name in _SUBTLE


def _completed(prompt_tokens: int, settings: dict[str, Any], **options: Any) -> tuple[int, int]:
    """The most and the least new tokens."""
    facts = {"text_generation": GenerationFacts(**settings)}
    spec = model_spec("text_generation", vocabulary_size=_VOCABULARY, max_tokens=100, facts=facts)
    complete = complete_options(GenerationOptions(**options), spec, prompt_tokens)
    return complete.max_new_tokens, complete.min_new_tokens


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ({"max_length": 12, "min_length": 9}, {}, (7, 4)),
        ({"max_length": 12, "max_new_tokens": 3, "min_length": 4}, {}, (3, 0)),
        ({"max_length": 12, "min_length": 30}, {}, (7, 7)),
        ({"min_length": 9, "min_new_tokens": 2}, {}, (95, 2)),
        ({"max_length": 5, "min_length": 9}, {"max_new_tokens": 8, "min_new_tokens": 1}, (8, 1)),
        ({"max_length": 500}, {}, (95, 0)),
    ],
)
def test_lengths_count_the_prompt_of_five_tokens_and_new_tokens_go_before_them(
    settings: dict[str, Any], options: dict[str, int], expected: tuple[int, int]
) -> None:
    assert _completed(5, settings, **options) == expected


def test_a_prompt_as_long_as_the_models_max_length_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"options.max_new_tokens: .* prompt has 12 tokens: .* max_length is 12"):
        _completed(12, {"max_length": 12})
