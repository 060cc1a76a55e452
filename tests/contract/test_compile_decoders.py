"""A decoder is compiled if the graph that runs chooses the tokens of transformers' `generate`, or it is refused."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from neuronpipe.bundles.compiler import CompileRequest, compile_bundle
from neuronpipe.bundles.compiler.tasks import text_generation
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.text_generation import GenerationFacts
from tests.decoders import save_decoder
from tests.sampling import sample_of

# What of these is whole: `make oracle` compiles all of them.
_EXACT = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "gpt-neox")


def _compile(source: Path, repository: Path, **changes: Any) -> Any:
    described: dict[str, Any] = {"source": str(source), "task": "", "repository": repository, "name": "m"}
    request = CompileRequest(**described | changes)
    return compile_bundle(request, lambda line: None)


@pytest.mark.parametrize("family", _EXACT)
def test_a_decoder_is_compiled_with_every_token_compared(
    family: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if family not in sample_of(pytestconfig).some(_EXACT):
        pytest.skip("not in the sample of this run")
    bundle = _compile(save_decoder(family, tmp_path / "source", repetition_penalty=1.1), tmp_path / "repository")
    accuracy = bundle.manifest.artifacts[0].accuracy
    facts = GenerationFacts.of(bundle.spec)
    assert accuracy.agreement == 1
    assert accuracy.largest_difference <= 1e-4 * accuracy.largest_output
    assert (facts.end_token_ids, facts.repetition_penalty, facts.do_sample) == ((2,), 1.1, False)
    assert (bundle.spec.task, bundle.spec.max_tokens) == ("text_generation", 192)


def test_a_decoder_whose_tokens_differ_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"OPTForCausalLM cannot be compiled .* tokens differ from transformers'"):
        _compile(save_decoder("opt", tmp_path / "source"), tmp_path / "repository")
    assert not (tmp_path / "repository" / "m").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "torch"}, "--backend torch: does not generate text; openvino does"),
        ({"backend": "fake"}, "--backend fake: does not generate text; openvino does"),
        ({"dtype": "int8"}, "--dtype int8: what generates text is compiled in float32 only"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16: what generates text is compiled in float32 only"),
        ({"cache_results": True}, "--cache-results: generated texts are not cached"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value.values())),
)
def test_what_is_not_there_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=message):
        _compile(save_decoder("llama", tmp_path / "source"), tmp_path / "repository", **changes)


@pytest.mark.parametrize(
    "setting",
    [{"num_return_sequences": 2, "do_sample": True}, {"guidance_scale": 2.0}, {"encoder_no_repeat_ngram_size": 3}],
    ids=lambda one: next(iter(one)),
)
def test_a_generation_config_that_would_be_ignored_is_refused(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"sets {next(iter(setting))} to .* which is not supported"):
        _compile(save_decoder("llama", tmp_path / "source", **setting), tmp_path / "repository")


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (transformers.MistralConfig(sliding_window=128), 128),
        (transformers.MistralConfig(sliding_window=None), None),
        (transformers.LlamaConfig(), None),
        (transformers.Qwen2Config(use_sliding_window=False, sliding_window=64), None),
        (transformers.Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=0), 64),
    ],
    ids=["Mistral", "Mistral without", "Llama", "Qwen2 without", "Qwen2"],
)
def test_a_sliding_window_is_the_longest_text(config: Any, window: int | None) -> None:
    assert text_generation._window(config) == window
