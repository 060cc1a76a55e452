"""Decoders that rank by a template of their own answer as their publishers' code does, and no other gets a template.

The formulas are those of FlagEmbedding 1.3 (decoder_only/base.py), mxbai-rerank 0.1 (mxbai_rerank_v2.py), and the cards
of Qwen3-Reranker, zerank and ctxl-rerank-v2.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from neuronpipe.api.v1.tasks_pb2 import RerankInput, ScoreFunction, TaskInput, Truncation
from neuronpipe.compiler import RerankerOptions
from neuronpipe.compiler.tasks import load_module
from neuronpipe.compiler.tokenizers import load_tokenizer, serving_json
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.tokenizer.text import JsonTokenizer
from neuronpipe.tasks.rerank import RerankFacts, check, decode, encode
from tests.contract.inference import infer_all
from tests.models.compiling import compile_model
from tests.models.repository import SMALL, save
from tests.models.tokenizers import byte_level_bpe

# As in test_decoders_that_embed.py, for logits of up to 5.
_TOLERANCE = 5e-5
_MAX_TOKENS = 320
_QUERIES = ("where do cats sleep?", " {braces} \n")
_TEXTS = (
    "The cat sat on the mat.",
    "\nLines \n",
    "{query} yes",
    "的 text",
    "ends with lines.\n\n",
    "many words " * 200,
)

Encode = Callable[[Any, str, str, str], Sequence[int]]

pytestmark = pytest.mark.long


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _qwen3(tokenizer: Any, instruction: str, query: str, text: str) -> Sequence[int]:
    judge = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    instruction = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
    suffix = _ids(tokenizer, "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    prefix = _ids(tokenizer, judge)
    return [*prefix, *_ids(tokenizer, pair)[: _MAX_TOKENS - len(prefix) - len(suffix)], *suffix]


def _flag_embedding(tokenizer: Any, instruction: str, query: str, text: str) -> Sequence[int]:
    instruction = instruction or (
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing "
        "a prediction of either 'Yes' or 'No'."
    )
    separator, question = _ids(tokenizer, "\n"), _ids(tokenizer, instruction)
    begin = [tokenizer.convert_tokens_to_ids("<bos>"), *_ids(tokenizer, f"A: {query}"), *separator]
    room = _MAX_TOKENS - len(begin) - len(separator) - len(question)
    return [*begin, *_ids(tokenizer, f"B: {text}")[:room], *separator, *question]


def _mxbai(tokenizer: Any, instruction: str, query: str, text: str) -> Sequence[int]:
    system = (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n"
    )
    task = (
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
    )
    separator = _ids(tokenizer, "\n")
    instructed = f"instruction: {instruction}\nquery: {query}" if instruction else f"query: {query}"
    begin = [*_ids(tokenizer, system), *_ids(tokenizer, instructed), *separator]
    end = [*separator, *_ids(tokenizer, task), *_ids(tokenizer, "<|im_end|>\n<|im_start|>assistant\n")]
    return [*begin, *_ids(tokenizer, f"document: {text}")[: _MAX_TOKENS - len(begin) - len(end)], *end]


def _zerank(tokenizer: Any, instruction: str, query: str, text: str) -> Sequence[int]:
    begin = _ids(tokenizer, f"<|im_start|>system\n{query}<|im_end|>\n<|im_start|>user\n")
    end = _ids(tokenizer, "<|im_end|>\n<|im_start|>assistant\n")
    return [*begin, *_ids(tokenizer, text)[: _MAX_TOKENS - len(begin) - len(end)], *end]


def _contextual(tokenizer: Any, instruction: str, query: str, text: str) -> Sequence[int]:
    head = "Check whether a given document contains information helpful to answer the query.\n<Document> "
    end = f"\n<Query> {query}{' ' * bool(instruction)}{instruction} ??"
    whole = _ids(tokenizer, head + text + end)
    if len(whole) <= _MAX_TOKENS:
        return whole
    behind = _ids(tokenizer, end)
    return [*_ids(tokenizer, head + text)[: _MAX_TOKENS - len(behind)], *behind]


_YES_NO: Mapping[str, tuple[Encode, tuple[str, ...], float]] = {
    "Qwen3-Reranker-0.6B": (_qwen3, ("yes", "no"), 1),
    "bge-reranker-v2-gemma": (_flag_embedding, ("Yes",), 1),
    "mxbai-rerank-base-v2": (_mxbai, ("1", "0"), 1),
    "zerank-1-small": (_zerank, ("Yes",), 5),
    "ctxl-rerank-v2-instruct-multilingual-1b": (_contextual, ("!",), 1),
}
_SIGMOIDS = ("Qwen3-Reranker-0.6B", "zerank-1-small")


def _decoder(folder: Path, kind: str = "Qwen2") -> Path:
    tokenizer = byte_level_bpe(max_tokens=_MAX_TOKENS)
    special = ["<|im_start|>", "<|im_end|>", "<bos>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(["<think>", "</think>", "yes", "no", "Yes"])
    tokenizer.chat_template = "{% for one in messages %}{{ one.role }}{% endfor %}"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=_MAX_TOKENS,
        **SMALL,
    )
    torch.manual_seed(49)
    return save(getattr(transformers, f"{kind}ForCausalLM")(config), folder, tokenizer)


def _loaded_scores(source: Path, query: str) -> list[float]:
    """The scores of the module in PyTorch, by the task's encode and decode."""
    tokenizer = load_tokenizer(source)
    module = load_module(source, "rerank", tokenizer)
    spec = module.spec("m", 1, {})
    input = RerankInput(query=query, texts=_TEXTS, truncation=Truncation.TRUNCATION_RIGHT)
    check(input, spec)
    encoded = encode(input, JsonTokenizer(serving_json(tokenizer, "").encode()), spec)
    outputs = []
    for sequence in encoded.sequences:
        ids = torch.from_numpy(sequence["input_ids"].astype(np.int64))[None]
        with torch.inference_mode():
            outputs.append({"logits": module.module(ids, torch.ones_like(ids))["logits"][0].numpy()})
    return [text.score for text in sorted(decode(input, spec, [], outputs).texts, key=lambda text: text.index)]


async def _scores(
    bundle: Any, query: str, function: "ScoreFunction.ValueType" = ScoreFunction.SCORE_FUNCTION_UNSPECIFIED
) -> list[float]:
    ranking = RerankInput(query=query, texts=_TEXTS, truncation=Truncation.TRUNCATION_RIGHT, function=function)
    (result,) = await infer_all(bundle.folder, [TaskInput(rerank=ranking)])
    return [text.score for text in sorted(result.rerank.texts, key=lambda text: text.index)]


def _logits(source: Path, name: str, query: str, instruction: str = "") -> list[float]:
    encode_as_published, answers, divisor = _YES_NO[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    numbers = tokenizer.convert_tokens_to_ids(list(answers))
    scores = []
    for text in _TEXTS:
        with torch.inference_mode():
            logits = model(torch.tensor([encode_as_published(tokenizer, instruction, query, text)])).logits[
                0, -1, numbers
            ]
        scores.append(float(logits[0] - logits[1:].sum()) / divisor)
    return scores


@pytest.mark.parametrize("name", _YES_NO)
def test_a_published_reranker_is_known_by_its_name_and_equals_its_formula(name: str, tmp_path: Path) -> None:
    source = _decoder(tmp_path / name, "Gemma" if "gemma" in name else "Qwen3" if "Qwen3" in name else "Qwen2")
    for query in _QUERIES:
        expected = np.array(_logits(source, name, query))
        if name in _SIGMOIDS:
            expected = 1 / (1 + np.exp(-expected))
        np.testing.assert_allclose(_loaded_scores(source, query), expected, rtol=0, atol=_TOLERANCE)


async def test_the_instruction_of_the_options_replaces_the_published(tmp_path: Path) -> None:
    name = "mxbai-rerank-base-v2"
    source = _decoder(tmp_path / name)
    bundle = compile_model(
        source, tmp_path / "repository", "rerank", reranker=RerankerOptions(instruction="Find the cat.")
    )
    expected = _logits(source, name, _QUERIES[0], "Find the cat.")
    np.testing.assert_allclose(await _scores(bundle, _QUERIES[0]), expected, rtol=0, atol=_TOLERANCE)


# Logits of up to 1, with the 8 bits of bfloat16's fraction, or of weights in int8.
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [("torch", "float32", _TOLERANCE), ("openvino", "bfloat16", 0.05), ("openvino", "int8-weights", 0.05)],
)
async def test_back_ends_and_number_types_agree_with_the_formula(
    backend: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    source = _decoder(tmp_path / "ctxl-rerank-v2")
    bundle = compile_model(source, tmp_path / "repository", "rerank", backend=backend, dtype=dtype)
    expected = _logits(source, "ctxl-rerank-v2-instruct-multilingual-1b", _QUERIES[0])
    np.testing.assert_allclose(await _scores(bundle, _QUERIES[0]), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["CausalLM", "SequenceClassification"])
async def test_a_template_of_the_options_is_stored_in_the_bundle(kind: str, tmp_path: Path) -> None:
    source = _decoder(tmp_path / "ours")
    written = "<|im_start|>Q: {query}\nD: {document}<|im_end|>{instruction}?"
    options = RerankerOptions(written, "{sure}", "Yes,no" if kind == "CausalLM" else "")
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    head = model.lm_head.weight[tokenizer.convert_tokens_to_ids(["Yes", "no"])]
    if kind != "CausalLM":
        classifier = transformers.Qwen2ForSequenceClassification.from_pretrained(source, num_labels=1)
        source, head = save(classifier, tmp_path / "classifier", tokenizer), classifier.score.weight
    bundle = compile_model(source, tmp_path / "repository", "rerank", reranker=options)
    template = RerankFacts.of(bundle.spec).template
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert template == ((start,), "Q: {query}\nD: {document}", (end, *_ids(tokenizer, "{sure}?")))
    body = (model if kind == "CausalLM" else classifier.eval()).model
    expected = []
    for text in _TEXTS[:5]:
        ids = _ids(tokenizer, f"<|im_start|>Q: {_QUERIES[0]}\nD: {text}<|im_end|>{{sure}}?")
        with torch.inference_mode():
            logits = head @ body(torch.tensor([ids])).last_hidden_state[0, -1]
        expected.append(float(logits[0] - logits[1:].sum()))
    ours = await _scores(bundle, _QUERIES[0], ScoreFunction.SCORE_FUNCTION_NONE)
    np.testing.assert_allclose(ours[:5], expected, rtol=0, atol=_TOLERANCE)


def test_a_reranker_without_a_known_template_is_refused_with_the_options_to_give(tmp_path: Path) -> None:
    source = _decoder(tmp_path / "source", "Qwen3")

    def compiled(**options: Any) -> Any:
        return compile_model(source, tmp_path / "repository", "rerank", reranker=RerankerOptions(**options))

    for readme in ("# Mine\n\nIt is better than Qwen3-Reranker.\n", "---\nbase_model: Qwen/Qwen3-0.6B-Base\n---\n"):
        (source / "README.md").write_text(readme)
        with pytest.raises(SetupError, match=r"give its template with --rerank-template, and .* with --rerank-answers"):
            compiled()
    refused = {
        "must have {query} once and {document} once": {"template": "{query}"},
        "--rerank-template: name the tokens that the model answers with --rerank-answers": {
            "template": "{query}{document}"
        },
        "'Maybe so' is not one token": {"template": "{query}{document}", "answers": "Yes,Maybe so"},
        "3 tokens, must be 1 or 2": {"template": "{query}{document}", "answers": "Yes,no,yes"},
        "the template has no {instruction}": {"template": "{query}{document}", "instruction": "a"},
    }
    for message, options in refused.items():
        with pytest.raises(SetupError) as raised:
            compiled(**options)
        assert message in str(raised.value)
    with pytest.raises(SetupError, match="are for --task rerank, not text_generation"):
        compile_model(source, tmp_path / "repository", reranker=RerankerOptions(answers="a"))
    for readme in ("---\nbase_model:\n- Qwen/Qwen3-Reranker-4B\n---\n", "# Qwen3-Reranker-0.6B\n"):
        (source / "README.md").write_text(readme)
        assert RerankFacts.of(load_module(source, "rerank", load_tokenizer(source)).spec("m", 1, {})).template
