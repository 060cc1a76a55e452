"""A decoder is compiled if the graph that runs chooses the tokens of transformers' `generate`, or it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from neuronpipe.compiler import CompileRequest, compile_with_reference, decoder_graphs, modules, slots
from neuronpipe.compiler.architectures import check_kinds, layer_windows
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes import paged
from neuronpipe.stages.neuron_executor.runtimes.openvino import engine, openvino
from neuronpipe.tasks.text_options import GenerationFacts
from tests.models.compiling import compile_model
from tests.models.decoders import save_decoder
from tests.models.encoder_decoders import MODELS as ENCODER_DECODERS
from tests.models.encoder_decoders import save_encoder_decoder
from tests.models.repository import for_neuron

_EXACT = (
    *("gpt2", "llama", "llama-tied", "mistral", "qwen2", "qwen3", "phi", "phi3", "gemma3", "gpt-neox", "opt"),
    *("mixtral", "qwen3-moe", "gpt-neo"),
)
# Their graphs gather the cache themselves.
_GATHERED = ("gemma2", "xglm")
# Experts, and attention that is no function which slots could replace.
_NOT_IN_SLOTS = ("mixtral", "qwen3-moe", "gpt-neo", "xglm")
# Untyped: accuracies that a bundle may lack are there.
_compile: Any = compile_model


@pytest.mark.sampled
@pytest.mark.parametrize("family", _EXACT)
def test_a_decoder_is_compiled_with_every_token_compared(family: str, tmp_path: Path) -> None:
    bundle = _compile(save_decoder(family, tmp_path / "source", repetition_penalty=1.1), tmp_path / "repository")
    accuracy = bundle.manifest.artifacts[0].accuracy
    facts = GenerationFacts.of(bundle.spec)
    assert [Path(name).name for name in bundle.manifest.artifacts[0].files] == ["model.xml", "model.bin"]
    assert accuracy.agreement == 1
    assert accuracy.largest_difference <= 1e-4 * accuracy.largest_output
    assert (facts.end_token_ids, facts.default_of("repetition_penalty"), facts.do_sample) == ((2,), 1.1, False)
    assert (bundle.spec.task, bundle.spec.max_tokens) == ("text_generation", 192)


@pytest.mark.sampled
@pytest.mark.parametrize("family", _GATHERED)
def test_a_decoder_that_paged_attention_computes_wrongly_gathers_its_cache_itself(family: str, tmp_path: Path) -> None:
    (artifact,) = _compile(save_decoder(family, tmp_path / "source"), tmp_path / "repository").manifest.artifacts
    assert [Path(name).name for name in artifact.files] == ["gathered.xml", "gathered.bin"]
    assert artifact.accuracy.agreement == 1
    assert artifact.accuracy.largest_difference <= 1e-4 * artifact.accuracy.largest_output


@pytest.mark.sampled
@pytest.mark.parametrize("family", [*_EXACT, *_GATHERED])
def test_a_decoder_is_compiled_for_pytorch_with_every_token_compared(family: str, tmp_path: Path) -> None:
    source = save_decoder(family, tmp_path / "source")
    (artifact,) = _compile(source, tmp_path / "repository", backend="torch").manifest.artifacts
    assert artifact.accuracy.agreement == 1
    assert artifact.accuracy.largest_difference <= 1e-4 * artifact.accuracy.largest_output


@pytest.mark.sampled
@pytest.mark.parametrize("family", [family for family in (*_EXACT, *_GATHERED) if family not in _NOT_IN_SLOTS])
def test_a_decoder_is_compiled_for_the_slots_of_neuron_with_every_token_compared(
    family: str, tmp_path: Path, neuron_double: object
) -> None:
    source = save_decoder(family, tmp_path / "source")
    bundle = _compile(source, tmp_path / "repository", **for_neuron(tmp_path, "4x96"))
    (artifact,) = bundle.manifest.artifacts
    assert artifact.accuracy.agreement == 1
    assert artifact.accuracy.largest_difference <= 1e-4 * artifact.accuracy.largest_output
    assert artifact.accuracy.emulator == "PyTorch instead of a Neuron device"
    assert [Path(name).name for name in artifact.files] == ["4x96.pt", "4x96.json"]
    assert bundle.spec.max_tokens == 96


@pytest.mark.parametrize(
    ("kind", "buckets", "message"),
    [
        ("llama", ("4x96", "1x96"), "--bucket: what generates has one, SLOTSxTOKENS.*here are 2"),
        ("llama", (), "neuronx computes only the shapes that it was compiled for"),
        ("gpt-neo", ("4x96",), "GPTNeoForCausalLM has attention of its own, and cannot be compiled for slots of fixed"),
    ],
)
def test_what_neuron_does_not_generate_is_refused(
    kind: str, buckets: tuple[str, ...], message: str, tmp_path: Path, neuron_double: object
) -> None:
    with pytest.raises(SetupError, match=message):
        _compile(save_decoder(kind, tmp_path / "source"), tmp_path / "repository", **for_neuron(tmp_path, *buckets))
    assert not (tmp_path / "repository" / "m").exists()


def test_a_decoder_whose_tokens_in_slots_differ_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neuron_double: object
) -> None:
    monkeypatch.setattr(slots._RunningStep, "attend", lambda step, query, *others: query.transpose(1, 2))
    with pytest.raises(SetupError, match=r"LlamaForCausalLM cannot be compiled .* tokens differ from transformers'"):
        _compile(save_decoder("llama", tmp_path / "source"), tmp_path / "repository", **for_neuron(tmp_path, "2x96"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("openvino", "bfloat16"), ("openvino", "int8-weights"), ("torch", "bfloat16"), ("neuronx", "bfloat16")],
)
def test_other_data_types_say_how_far_they_agree_and_are_refused_below_a_limit(
    backend: str, dtype: str, tmp_path: Path, neuron_double: object
) -> None:
    source, chosen = save_decoder("llama", tmp_path / "source"), {"backend": backend, "dtype": dtype}
    if backend == "neuronx":
        chosen |= for_neuron(tmp_path, "4x96")
    (artifact,) = _compile(source, tmp_path / "repository", **chosen, min_agreement=0.5).manifest.artifacts
    agreement = artifact.accuracy.emulated_agreement or artifact.accuracy.agreement
    assert artifact.dtype == dtype
    assert 0.5 <= agreement < 1, "tokens of random weights are near ties"
    with pytest.raises(SetupError, match=r"the artefact's agreement with PyTorch float32 is .*, the limit is 1"):
        _compile(source, tmp_path / "repository", **chosen, min_agreement=1.0)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "bart", "t5"])
def test_tables_of_weights_of_8_bits_stay_in_8_bits_when_they_are_loaded(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In paged and gathered graphs, beside an encoder, and where scores are multiplied by the table of words."""
    loaded: list[openvino.CompiledModel] = []

    class Engine:
        read_model = engine().read_model

        def _compile(self, *given: Any) -> openvino.CompiledModel:
            loaded.append(engine()._compile(*given))
            return loaded[-1]

    save = save_encoder_decoder if family in ENCODER_DECODERS else save_decoder
    source = save(family, tmp_path / "source")
    monkeypatch.setattr(paged, "engine", Engine)
    bundle = _compile(source, tmp_path / "repository", dtype="int8-weights", min_agreement=1e-9)
    words = bundle.spec.vocabulary_size
    nodes = [node for graph in loaded for node in graph.get_runtime_model().get_ops()]
    constants = [node.output(0) for node in nodes if node.get_rt_info()["layerType"].astype(str) == "Const"]
    tables = [constant for constant in constants if len(constant.get_shape()) == 2 and constant.get_shape()[0] == words]
    assert {table.get_element_type().get_type_name() for table in tables if table.get_shape()[1] > 1} == {"u8"}


def test_a_decoder_whose_tokens_differ_is_refused_unwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_graphs, "added_to_scores", lambda is_seen, dtype, seen=0.0: is_seen * 0.0)
    with pytest.raises(SetupError, match=r"Gemma2ForCausalLM cannot be compiled .* tokens differ from transformers'"):
        _compile(save_decoder("gemma2", tmp_path / "source"), tmp_path / "repository")
    assert not (tmp_path / "repository" / "m").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "fake"}, "--backend fake: does not generate text; openvino, torch, neuronx do"),
        ({"dtype": "int8"}, "--dtype int8: what generates text is compiled for openvino in float32, bfloat16, int8-we"),
        ({"cache_results": True}, "--cache-results: generated texts are not cached"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value.values())),
)
def test_what_is_not_there_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=message):
        _compile(save_decoder("llama", tmp_path / "source"), tmp_path / "repository", **changes)


@pytest.mark.parametrize(
    "setting",
    [
        {"num_return_sequences": 2, "do_sample": True},
        {"guidance_scale": 2.0},
        {"top_h": 0.5},
        {"max_time": 5.0},
        {"force_words_ids": [[5]]},
        {"num_beam_groups": 2},
        {"remove_invalid_values": True},
        {"num_beams": 32},
        {"temperature": 0.0, "do_sample": True},
        {"bad_words_ids": [[1 << 20]]},
        {"sequence_bias": [[[1 << 20], 1.0]]},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_generation_config_that_would_be_ignored_or_refuses_every_request_is_refused(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    source, (name, *_) = save_decoder("llama", tmp_path / "source"), setting
    described = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(json.dumps(described | setting))
    with pytest.raises(SetupError, match=f"its generation_config sets {name} "):
        _compile(source, tmp_path / "repository")


_SLIDING = ("mistral", "gemma3", "gemma2")


@pytest.mark.sampled
@pytest.mark.parametrize("family", _SLIDING)
def test_windows_are_compared_with_prompts_of_five_windows(family: str, tmp_path: Path) -> None:
    source = str(save_decoder(family, tmp_path / "source"))
    texts = compile_with_reference(CompileRequest(source, "", tmp_path / "repository", "m"), lambda line: None).texts
    window = transformers.AutoConfig.from_pretrained(tmp_path / "source").sliding_window
    assert max(len(text.prompt) for text in texts) >= 5 * window


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (transformers.MistralConfig(sliding_window=128, num_hidden_layers=2), (128, 128)),
        (transformers.MistralConfig(sliding_window=None, num_hidden_layers=2), (0, 0)),
        (transformers.LlamaConfig(num_hidden_layers=2), (0, 0)),
        (transformers.Qwen2Config(use_sliding_window=False, sliding_window=64, num_hidden_layers=2), (0, 0)),
        (
            transformers.Qwen2Config(
                use_sliding_window=True, sliding_window=64, max_window_layers=1, num_hidden_layers=2
            ),
            (0, 64),
        ),
        (transformers.Gemma2Config(sliding_window=64, num_hidden_layers=2), (64, 0)),
        (transformers.Gemma3TextConfig(sliding_window=64, num_hidden_layers=6), (64, 64, 64, 64, 64, 0)),
    ],
    ids=["Mistral", "Mistral without", "Llama", "Qwen2 without", "Qwen2", "Gemma 2", "Gemma 3"],
)
def test_windows_are_those_of_each_layer(config: Any, windows: tuple[int, ...]) -> None:
    assert layer_windows(config) == windows


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.Llama4TextConfig(num_hidden_layers=2, layer_types=["chunked_attention", "full_attention"]),
            "it has layers of chunked_attention",
        ),
        (transformers.MptConfig(max_seq_len=512), "its attention adds biases by distance"),
        (transformers.BloomConfig(), "its attention adds biases by distance"),
        (transformers.FalconConfig(alibi=True), "its attention adds biases by distance"),
        (transformers.GptOssConfig(), r"its softmax has a further score that it learned \(attention sinks\)"),
        (transformers.DeepseekV3Config(), "its cache holds compressed keys and values"),
    ],
    ids=["Llama 4", "MPT", "BLOOM", "Falcon with ALiBi", "GPT-OSS", "DeepSeek-V3"],
)
def test_layers_of_another_kind_of_attention_are_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(SetupError, match=f"XForCausalLM cannot be compiled for text generation: {message}"):
        check_kinds("XForCausalLM", config)


def test_longrope_is_compiled_up_to_the_length_of_its_short_factors(tmp_path: Path) -> None:
    lines: list[str] = []
    source = save_decoder("phi3-longrope", tmp_path / "source")
    bundle = _compile(source, tmp_path / "repository", report=lines.append)
    assert bundle.spec.max_tokens == 96, "of 192 positions"
    assert "longrope, whose factors of short texts hold up to 96 tokens" in "".join(lines)


def test_what_is_wrong_with_length_alone_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "rotary_limit", lambda config: None)
    with pytest.raises(SetupError, match=r"Phi3ForCausalLM cannot be compiled .* tokens differ from transformers'"):
        _compile(save_decoder("phi3-longrope", tmp_path / "source"), tmp_path / "repository")
