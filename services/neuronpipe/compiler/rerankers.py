"""Rerankers: further tasks of a classifier of text pairs, and decoders that answer yes or no (Qwen3-Reranker)."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers

from neuronpipe.compiler.modules import Named, SourceModule, labels_of, source_module
from neuronpipe.compiler.own_code import with_links
from neuronpipe.compiler.saved_files import read_object
from neuronpipe.compiler.sentence_transformers import (
    applied_settings,
    default_prompt,
    last_token,
    read_limits,
    read_modules,
    read_settings,
    transformer_folder,
)
from neuronpipe.compiler.source import ModelSource, check_labels
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.rerank import RerankFacts
from neuronpipe.tasks.scores import ScoreFunctionName
from neuronpipe.tasks.zero_shot_classification import ZeroShotFacts

# Source: get_default_activation_fn of sentence-transformers 6, cross_encoder/model.py.
_ACTIVATIONS: dict[str, ScoreFunctionName] = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


def ranking(folder: Path, config: Any) -> RerankFacts:
    """Returns the facts of a model for reranking. Raises SetupError if the model cannot rank."""
    if config.num_labels != 1:
        raise SetupError(
            f"{folder}: has {config.num_labels} labels; a cross-encoder that ranks texts has one, the score"
        )
    return RerankFacts(score_function=score_function(folder, config), prompt=default_prompt(folder))


def score_function(folder: Path, config: Any) -> ScoreFunctionName:
    activation = _activation(folder, config)
    if activation not in _ACTIVATIONS:
        raise SetupError(f"{folder}: makes scores of logits by {activation}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def entailing(folder: Path, config: Any) -> ZeroShotFacts:
    """Returns the facts of a model for zero-shot classification. Raises SetupError if no label is for entailment.

    Source: transformers, pipelines/zero_shot_classification.py.
    """
    check_labels(folder, config)
    labels = labels_of(config)
    entailment = next((index for index, label in enumerate(labels) if label.lower().startswith("entail")), None)
    if entailment is None or config.num_labels < 2:
        raise SetupError(
            f"{folder}: none of its labels begins with 'entail', or it is the only one; there are: "
            f"{', '.join(labels)}. Zero-shot classification needs a model of entailment; if this is one, name its "
            "labels in config.json (id2label and label2id)"
        )
    return ZeroShotFacts(entailment_id=entailment)


def is_cross_encoder(folder: Path, config: Any) -> bool:
    return read_settings(folder).get("model_type") == "CrossEncoder" or any(
        hasattr(config, name) for name in ("sentence_transformers", "sbert_ce_default_activation_function")
    )


def _activation(folder: Path, config: Any) -> str:
    candidates = (
        applied_settings(folder).get("activation_fn"),
        (getattr(config, "sentence_transformers", None) or {}).get("activation_fn"),
        getattr(config, "sbert_ce_default_activation_function", None),
    )
    return next((str(candidate) for candidate in candidates if candidate), "torch.nn.modules.activation.Sigmoid")


Template: TypeAlias = tuple[tuple[int, ...] | str, ...]


@dataclass(frozen=True, slots=True)
class RerankerOptions:
    """A decoder's template, with {query}, {document}, {instruction} and {|} between parts that are encoded apart.

    `answers`: the tokens whose logits make the score, positive first, divided by a comma. Empty: by the model's files.
    `model`: the name of the model's folder.
    """

    template: str = ""
    instruction: str = ""
    answers: str = ""
    model: str = ""


NO_OPTIONS = RerankerOptions()


@dataclass(frozen=True, slots=True)
class _Published:
    """The form of texts and scores of a published model. `instructed`: the form of an instruction, if any."""

    options: RerankerOptions
    instructed: str = "{}"
    function: ScoreFunctionName = "none"
    divisor: float = 1.0


@cache
def _published_models() -> Mapping[str, _Published]:
    """Reads the forms of models whose files lack their template, by a pattern of their names.

    Sources of rerankers.json: the cards of Qwen3-Reranker and ctxl-rerank-v2; FlagEmbedding 1.3, decoder_only/base.py;
    mxbai-rerank 0.1, mxbai_rerank_v2.py; zerank's modeling_zeranker.py.
    """
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {pattern: _Published(RerankerOptions(**form.pop("options")), **form) for pattern, form in content.items()}


_OPTIONS_FILE = "neuronpipe_reranker.json"
_PARTS = "{|}"
# Placeholders of the texts in a template. No text contains them.
_QUERY, _DOCUMENT = "\ue000\ue001", "\ue002\ue003"
# Pairs for which the parts must equal the template, because some templates remove spaces and line ends.
_SAMPLES = (("one", "other"), (" Two words. ", "\n1. {a}\n\n"), ("naïve 🙂", "的 text"))


class _YesOrNo(torch.nn.Module):
    """A decoder with the rows of its head for one or two answers: the logit of the first answer minus the second."""

    def __init__(self, model: Any, answers: Sequence[int], divisor: float) -> None:
        super().__init__()
        self._divisor = divisor
        self.named = Named(model.base_model, "last_hidden_state")
        head = model.get_output_embeddings()
        self.head = torch.nn.Linear(head.in_features, len(answers), bias=head.bias is not None)
        with torch.no_grad():
            self.head.weight.copy_(head.weight[list(answers)])
            if head.bias is not None:
                self.head.bias.copy_(head.bias[list(answers)])
        self.head.requires_grad_(False)
        self._cap = getattr(model.config, "final_logit_softcapping", None)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        vectors = self.named(input_ids, attention_mask)["last_hidden_state"]
        logits = self.head(last_token(vectors, attention_mask))
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return {"logits": (logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]) / self._divisor}


def with_options(source: ModelSource, options: RerankerOptions, scratch: Path) -> ModelSource:
    """Returns the model in a folder of `scratch` with links, and with the options in a file that every load reads."""
    linked = with_links(source, scratch)
    named = replace(options, model=_folder_name(source.folder))
    (linked.folder / _OPTIONS_FILE).write_text(json.dumps(asdict(named)))
    return linked


def load_decoder_reranker(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    """Loads a decoder that answers yes or no. Raises SetupError if it lacks the tokens or the template of a reranker.

    Sources: sentence-transformers 6, cross_encoder/model.py, logit_score.py and base/modules/transformer.py.
    """
    model = load_weights(transformers.AutoModelForCausalLM, folder)
    if model.get_output_embeddings().weight.requires_grad:
        raise SetupError(f"{folder}: its weights lack the head, which makes tokens of vectors; save the model again")
    options, reason = read_options(folder), "the options"
    published = _Published(options, function=score_function(folder, model.config))
    template = () if options.template else _saved_template(folder, tokenizer, options)
    if template is None:
        name, published = _published(folder, options.model or _folder_name(folder))
        reason, merged = f"that of {name}", {name: value for name, value in asdict(options).items() if value}
        options = replace(published.options, **merged)
    if options.template:
        template = written_template(folder, tokenizer, options, published.instructed)
    answers = _answers(folder, tokenizer, options)
    prompt = "" if template else default_prompt(folder)
    facts = RerankFacts(score_function=published.function, prompt=prompt, template=template or ())
    names = tokenizer.transformers_tokenizer.convert_ids_to_tokens(list(answers))
    limit = read_limits(transformer_folder(folder)).get("max_seq_length")
    divided = f", divided by {published.divisor:g}" if published.divisor != 1 else ""
    remarks = {"score": "the logit of " + ", less that of ".join(map(repr, names)) + divided}
    if options.template:
        remarks["template"] = reason
    module = _YesOrNo(model, answers, published.divisor)
    return source_module(module, model, "rerank", tokenizer, saved_limit=limit, facts=facts, remarks=remarks)


def read_options(folder: Path) -> RerankerOptions:
    return RerankerOptions(**read_object(folder / _OPTIONS_FILE, may_lack=True))


def written_template(
    folder: Path, tokenizer: SourceTokenizer, options: RerankerOptions, instructed: str = "{}"
) -> Template:
    """Splits the text of a template into its parts. Raises SetupError for a text without the places of a template."""
    text = options.template
    if text.count("{query}") != 1 or text.count("{document}") != 1:
        raise SetupError(f"{folder}: --rerank-template must have {{query}} once and {{document}} once")
    if options.instruction and "{instruction}" not in text:
        raise SetupError(f"{folder}: --rerank-instruction: the template has no {{instruction}}")
    instruction = options.instruction or default_prompt(folder)
    written = text.replace("{instruction}", instructed.format(instruction) if instruction else "")
    marked = written.replace("{query}", _QUERY).replace("{document}", _DOCUMENT)
    parts = (_parts(tokenizer.transformers_tokenizer, piece) for piece in marked.split(_PARTS))
    return tuple(part for piece in parts for part in piece)


def _folder_name(folder: Path) -> str:
    """Returns the name of a model's folder, or the name of the model in a folder of the Hub's cache."""
    resolved = folder.resolve()
    return resolved.parent.parent.name if resolved.parent.name == "snapshots" else resolved.name


def _published(folder: Path, folder_name: str) -> tuple[str, _Published]:
    """Finds the published model that the folder or README.md names, and its form. Raises SetupError."""
    names = [folder_name]
    if (readme := folder / "README.md").is_file():
        text = readme.read_text(encoding="utf-8", errors="replace")
        names += re.findall(r"^# .*|^base_model:\s.*(?:\n[ -].*)*", text, re.MULTILINE)[:2]
    for name in names:
        for pattern, form in _published_models().items():
            if found := re.search(pattern, name, re.IGNORECASE):
                return found.group(), form
    raise SetupError(
        f"{folder}: how it reads a query and a document is not known: its tokenizer has no chat template with the "
        "roles query and document, and README.md names no reranker whose template is known; give its template with "
        "--rerank-template, and the tokens that it answers with --rerank-answers"
    )


def encode_written(module: SourceModule, template: Template, queries: Sequence[str], texts: Sequence[str]) -> Any:
    """Encodes the pairs as inputs of the model, int64 [batch, tokens] by name, each cut to the model's limit."""
    tokenizer = module.tokenizer.transformers_tokenizer
    rows = [
        [number for part in template for number in _tokens_of(tokenizer, part, query, text)][-module.max_tokens :]
        for query, text in zip(queries, texts, strict=True)
    ]
    width = max(map(len, rows))
    padded = [[*row, *[module.tokenizer.pad_token_id] * (width - len(row))] for row in rows]
    masks = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    return {"input_ids": np.array(padded, np.int64), "attention_mask": np.array(masks, np.int64)}


def _answers(folder: Path, tokenizer: SourceTokenizer, options: RerankerOptions) -> tuple[int, ...]:
    """Returns the tokens whose logits make the score: by the options, else by LogitScore, else yes and no."""
    transformers_tokenizer = tokenizer.transformers_tokenizer
    vocabulary = transformers_tokenizer.get_vocab()
    if options.answers:
        answers = [_token(transformers_tokenizer, name) for name in options.answers.split(",")]
        if wrong := [name for name, number in zip(options.answers.split(","), answers, strict=True) if number is None]:
            raise SetupError(f"{folder}: --rerank-answers: {wrong[0]!r} is not one token of its tokenizer")
        if len(answers) > 2:
            raise SetupError(f"{folder}: --rerank-answers: {len(answers)} tokens, must be 1 or 2")
        return tuple(number for number in answers if number is not None)
    for kind, path in read_modules(folder):
        if kind == "LogitScore":
            config = read_object(path / "config.json")
            saved = (config["true_token_id"], config.get("false_token_id"))
            return tuple(int(number) for number in saved if number is not None)
    if options.template:
        raise SetupError(f"{folder}: --rerank-template: name the tokens that the model answers with --rerank-answers")
    if not {"yes", "no"} <= vocabulary.keys():
        problem = "its tokenizer has no tokens 'yes' and 'no', by which a decoder ranks texts"
        raise SetupError(f"{folder}: {problem}; name others with --rerank-answers")
    return vocabulary["yes"], vocabulary["no"]


def _token(tokenizer: Any, name: str) -> int | None:
    """Returns the number of a token by its spelling, or of the only token of a text; None if there is none."""
    vocabulary = tokenizer.get_vocab()
    if name in vocabulary:
        return int(vocabulary[name])
    token_ids = tokenizer(name, add_special_tokens=False)["input_ids"]
    return int(token_ids[0]) if len(token_ids) == 1 else None


def _saved_template(folder: Path, tokenizer: SourceTokenizer, options: RerankerOptions) -> Template | None:
    """Returns the chat template for a query and a text. Without a template: an empty one for a saved cross-encoder,
    which reads the two texts as a pair; otherwise None. Raises SetupError.
    """
    transformers_tokenizer = tokenizer.transformers_tokenizer
    is_saved = (folder / "modules.json").is_file()
    if not transformers_tokenizer.chat_template:
        return () if is_saved else None
    processing = read_limits(transformer_folder(folder)).get("processing_kwargs") or {}
    template_options = dict(processing.get("chat_template") or {})
    if template_options.pop("restore_suffix", True) is False:
        problem = "cuts the end of its template with a long text (restore_suffix), which is not supported"
        raise SetupError(f"{folder}: {problem}; remove restore_suffix from processing_kwargs")
    prompt = options.instruction or default_prompt(folder)
    for wrap in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
        # the content as a string, then as a list of parts
        render = _renderer(transformers_tokenizer, prompt, template_options, wrap)
        rendered = render(_QUERY, _DOCUMENT)
        if rendered.count(_QUERY) == 1 and rendered.count(_DOCUMENT) == 1:
            return _checked_template(folder, transformers_tokenizer, render)
    return None


def _renderer(
    tokenizer: Any, prompt: str, options: Mapping[str, Any], wrap: Callable[[str], Any]
) -> Callable[[str, str], str]:
    def render(query: str, text: str) -> str:
        messages = [{"role": "query", "content": wrap(query)}, {"role": "document", "content": wrap(text)}]
        if prompt:
            messages = [{"role": "system", "content": wrap(prompt)}, *messages]
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception:  # a template may refuse unknown parts with any exception
            return ""

    return render


def _checked_template(folder: Path, tokenizer: Any, render: Callable[[str, str], str]) -> Template:
    """Returns the parts of the rendered template. Raises SetupError if the template changes the texts."""
    template = _parts(tokenizer, render(_QUERY, _DOCUMENT))
    for query, text in _SAMPLES:
        token_ids = [number for part in template for number in _tokens_of(tokenizer, part, query, text)]
        if token_ids != tokenizer(render(query, text), add_special_tokens=False)["input_ids"]:
            raise SetupError(f"{folder}: its chat template changes the texts that are written into it; not supported")
    return template


def _parts(tokenizer: Any, rendered: str) -> Template:
    """Splits a rendered template at special tokens: fixed tokens, and texts with {query} and {document}."""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    pattern = "|".join(re.escape(content) for content in sorted(special, key=len, reverse=True))
    parts: list[tuple[int, ...] | str] = []
    for piece in re.split(f"({pattern})", rendered) if pattern else [rendered]:
        if _QUERY in piece or _DOCUMENT in piece:
            escaped = piece.replace("{", "{{").replace("}", "}}")
            parts.append(escaped.replace(_QUERY, "{query}").replace(_DOCUMENT, "{document}"))
        elif piece:
            tokens = (
                (special[piece],)
                if piece in special
                else tuple(tokenizer(piece, add_special_tokens=False)["input_ids"])
            )
            before = parts.pop() if parts and not isinstance(parts[-1], str) else ()
            parts.append((*before, *tokens))
    return tuple(parts)


def _tokens_of(tokenizer: Any, part: Sequence[int] | str, query: str, text: str) -> Sequence[int]:
    if not isinstance(part, str):
        return part
    return tokenizer(part.format(query=query, document=text), add_special_tokens=False)["input_ids"]
