"""GLiNER: an encoder that reads labels and a text as one sequence, and scores spans or words for each label.

A checkpoint has gliner_config.json, in which the encoder's configuration is `encoder_config`. Equal to gliner 0.2
(modeling/base.py, UniEncoderSpanModel and UniEncoderTokenModel; modeling/span_rep.py, SpanMarkerV0;
modeling/scorers.py, Scorer) with the products in another order: the last layer of a span's vector is applied to the
labels, of which there are few, and not to the spans.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.functional import pad

from neuronpipe.compiler.modules import Named, SampleBatch, SourceModule, source_module
from neuronpipe.compiler.saved_files import read_object
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.zero_shot_token_classification import MAX_LABELS, WORD_NUMBER, GlinerFacts, number_words, split

_CONFIG_FILE = "gliner_config.json"
ARCHITECTURE = "GLiNER"
_ENCODERS = ("bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")
_OF_TOKENS = "token_level"
# Field of gliner_config.json → its values that are supported; None for a field that is missing.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # The package reads span_mode instead, because some of its versions wrote the type of a model of spans for all.
    "model_type": ("gliner_uni_encoder_span", "gliner_uni_encoder_token", "gliner", "", None),
    "span_mode": ("markerV0", _OF_TOKENS),
    "subtoken_pooling": ("first", None),
    "words_splitter_type": ("whitespace", None),
    "num_rnn_layers": (0, 1, None),
    **dict.fromkeys(
        ("post_fusion_schema", "fuse_layers", "precomputed_prompts_mode", "represent_spans"), (None, "", False)
    ),
    **dict.fromkeys(("labels_encoder", "labels_decoder", "relations_layer", "span_encoder_config"), (None, "")),
}
_LABELS_ENCODER = "its labels have an encoder and a tokenizer of their own, and a bundle has one of each"
_RELATIONS = "it finds relations of entities, which zero-shot-token-classification does not return"
# A part of a field or of its value → the reason why it is not supported.
_REASONS = {
    "bi_encoder": _LABELS_ENCODER,
    "labels_encoder": _LABELS_ENCODER,
    "decoder": "it writes labels of its own, which zero-shot-token-classification does not return",
    "relex": _RELATIONS,
    "relations_layer": _RELATIONS,
}
_SAMPLE_LABELS = ("person", "organization", "place of an event")


def configuration_file(folder: Path) -> Path | None:
    """Returns the configuration file of a GLiNER; None for other models."""
    return path if (path := folder / _CONFIG_FILE).is_file() else None


def write_encoder(source: Path, configuration: Path, folder: Path) -> None:
    """Writes the encoder's config.json, with GLiNER as its architecture. Raises SetupError."""
    content = _encoder_configuration(source, read_object(configuration))
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(content))


def _encoder_configuration(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    for name, values in _SUPPORTED.items():
        if (value := content.get(name)) not in values:
            shown = ", ".join(repr(supported) for supported in values if supported not in (None, "", False)) or "none"
            because = next((f" ({reason})" for part, reason in _REASONS.items() if part in f"{name} {value}"), "")
            raise SetupError(
                f"{folder}: {_CONFIG_FILE} has {name} {value!r}, which is not supported{because}; supported: {shown}"
            )
    encoder = content.get("encoder_config")
    if not isinstance(encoder, dict) or not (folder / "tokenizer_config.json").is_file():
        advice = "write both with GLiNER.from_pretrained(MODEL).save_pretrained(FOLDER) of the package gliner"
        raise SetupError(f"{folder}: {_CONFIG_FILE} has no encoder_config, or the folder no tokenizer; {advice}")
    kind = encoder.get("model_type", "deberta-v2")
    if kind not in _ENCODERS:
        raise SetupError(f"{folder}: {_CONFIG_FILE} has an encoder {kind!r}; supported are {', '.join(_ENCODERS)}")
    rows = content.get("vocab_size", -1)
    sizes = {"vocab_size": rows} if isinstance(rows, int) and rows > 0 else {}
    return {**encoder, **sizes, "model_type": kind, "architectures": [ARCHITECTURE]}


class _Lstm(torch.nn.Module):
    """A bidirectional layer over the words of each row, whose states at padding are 0.

    The backward direction reads each row's words in reverse order, so that padding comes last in both directions.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        places = torch.arange(mask.shape[1], device=mask.device)
        last = mask.sum(dim=1, keepdim=True).to(torch.int64) - 1
        reversal = (places[None, :, None] + places[None, None, :] == last[:, :, None]).to(words.dtype)
        backward = reversal @ self._states(reversal @ words, "_reverse")
        return torch.cat([self._states(words, ""), backward], dim=-1) * mask.unsqueeze(-1)

    def _states(self, words: torch.Tensor, end: str) -> torch.Tensor:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        weights = [getattr(self.lstm, f"{name}_l0{end}") for name in names]
        state = words.new_zeros(1, words.shape[0], self.lstm.hidden_size)
        states: torch.Tensor = torch.lstm(words, (state, state), weights, True, 1, 0.0, False, False, True)[0]
        return states


class _Scorer(torch.nn.Module):
    """Scores each word as the start, the end and the inside of an entity of each label."""

    # Whether only labels that a text of the batch names are computed, for graphs whose shapes are free.
    takes_rows = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj_token, self.proj_label = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, 2 * width)
        self.out_mlp = _layers(3 * width, 4 * width, 3)

    def forward(self, words: torch.Tensor, prompts: torch.Tensor, is_named: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch, tokens, 3, MAX_LABELS]; unnamed labels get the logits of the first label.

        `words` [batch, tokens, width], `prompts` [batch, MAX_LABELS, width], `is_named`: bool [MAX_LABELS].
        """
        places = torch.arange(MAX_LABELS, device=words.device)
        rows = is_named.nonzero()[:, 0] if self.takes_rows else places
        first, last = self.out_mlp[0], self.out_mlp[3]
        of_word, of_label, of_both = first.weight.chunk(3, dim=1)
        added_word, word = self.proj_token(words).chunk(2, dim=-1)
        added_label, label = self.proj_label(prompts.index_select(1, rows)).chunk(2, dim=-1)
        hidden = (word.unsqueeze(2) * label.unsqueeze(1)) @ of_both.T
        hidden = hidden + (added_word @ of_word.T + first.bias).unsqueeze(2) + (added_label @ of_label.T).unsqueeze(1)
        choice = (rows[:, None] == torch.where(is_named, places, 0)[None, :]).to(words.dtype)
        return last(hidden.relu()).transpose(2, 3) @ choice


class GlinerModel(transformers.PreTrainedModel):
    """The parts of a GLiNER by their published names, and the logits of spans or words.

    `word_number` [batch, tokens]: n for the first token of the nth word of the text, -n for the token of the nth label,
    0 for others. Returns `logits`:

    - [batch, tokens, widths, MAX_LABELS] by a model of spans: for the nth word, the spans of 1, 2 … words that begin
      there
    - [batch, tokens, 3, MAX_LABELS] by a model of tokens: for the nth word, see `_Scorer`
    """

    config_class = transformers.PretrainedConfig
    published_as = ARCHITECTURE

    def __init__(self, config: Any, gliner: Mapping[str, Any]) -> None:
        encoder_config = copy.deepcopy(config)  # the encoder chooses its own form of attention
        super().__init__(config)
        width, self._widths = int(gliner["hidden_size"]), int(gliner["max_width"])
        self.token_rep_layer = torch.nn.Module()
        self.token_rep_layer.bert_layer = torch.nn.Module()
        self.token_rep_layer.bert_layer.model = transformers.AutoModel.from_config(encoder_config)
        self._projects = width != config.hidden_size
        if self._projects:
            self.token_rep_layer.projection = torch.nn.Linear(config.hidden_size, width)
        self._is_recurrent = bool(gliner.get("num_rnn_layers", 1))
        if self._is_recurrent:
            self.rnn = _Lstm(width)
        self._scores_words = gliner["span_mode"] == _OF_TOKENS
        if self._scores_words:
            self.scorer = _Scorer(width)
        else:
            spans = torch.nn.Module()
            spans.project_start, spans.project_end = _projection(width, width), _projection(width, width)
            spans.out_project = _projection(2 * width, width)
            self.span_rep_layer = torch.nn.Module()
            self.span_rep_layer.span_rep_layer = spans
            self.prompt_rep_layer = _projection(width, width)
        self._shift = 0 if gliner.get("embed_ent_token", True) else 1
        self.post_init()

    @property
    def base_model(self) -> Any:
        return self.token_rep_layer.bert_layer.model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, word_number: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        assert word_number is not None  # noqa: S101 (the input that the module is made for)

        vectors = Named(self.base_model, "last_hidden_state")(input_ids, attention_mask)["last_hidden_state"]
        if self._projects:
            vectors = self.token_rep_layer.projection(vectors)
        numbers = torch.arange(1, word_number.shape[1] + 1, device=word_number.device)
        # A product with 0 or 1 chooses each token, because every compiler of static shapes supports it.
        words = (word_number.unsqueeze(1) == numbers[:, None]).to(vectors.dtype) @ vectors
        labels = torch.arange(1, MAX_LABELS + 1, device=word_number.device)
        named = pad(vectors, (0, 0, 0, self._shift))[:, self._shift :]
        prompts = (word_number.unsqueeze(1) == -labels[:, None]).to(vectors.dtype) @ named
        if self._is_recurrent:
            words = self.rnn(words, (numbers <= word_number.max(dim=1, keepdim=True).values).to(vectors.dtype))
        if self._scores_words:
            return {"logits": self.scorer(words, prompts, -labels >= word_number.min().clamp(max=-1))}
        return {"logits": self._span_logits(words, self.prompt_rep_layer(prompts))}

    def _span_logits(self, words: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        spans = self.span_rep_layer.span_rep_layer
        first, last = spans.out_project[0], spans.out_project[3]
        width = words.shape[-1]
        starts = spans.project_start(words).relu() @ first.weight[:, :width].T + first.bias
        ends = spans.project_end(pad(words, (0, 0, 0, self._widths - 1))).relu() @ first.weight[:, width:].T
        weights, biases = last.weight.T @ prompts.transpose(1, 2), prompts @ last.bias
        logits = [
            (starts + ends[:, number : number + words.shape[1]]).relu() @ weights + biases.unsqueeze(1)
            for number in range(self._widths)
        ]
        return torch.stack(logits, dim=2)


def _projection(width: int, made: int) -> torch.nn.Sequential:
    return _layers(width, 4 * made, made)


def _layers(width: int, inner: int, made: int) -> torch.nn.Sequential:
    """Makes two layers, numbered as in the package, which has a dropout between them."""
    first, last = torch.nn.Linear(width, inner), torch.nn.Linear(inner, made)
    return torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Identity(), last)


class _Loader:
    """Loads the weights as transformers' automatic classes do."""

    def __init__(self, gliner: Mapping[str, Any]) -> None:
        self._gliner = gliner

    def from_pretrained(self, folder: Path, **options: Any) -> Any:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        del options["trust_remote_code"]
        return GlinerModel.from_pretrained(folder, gliner=self._gliner, config=config, **options)


def load_gliner(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    """Loads a GLiNER. Raises SetupError."""
    content = read_object(folder / _CONFIG_FILE)
    model = load_weights(_Loader(content), folder)
    facts = _facts(folder, content, tokenizer)
    spans = f", in spans of up to {facts.max_width}" if facts.max_width else ""
    remarks = {"words": f"up to {facts.max_words}{spans}"}
    return source_module(
        model,
        model,
        "zero_shot_token_classification",
        tokenizer,
        per_token=True,
        facts=facts,
        remarks=remarks,
        further_inputs=(WORD_NUMBER,),
    )


def _facts(folder: Path, content: Mapping[str, Any], tokenizer: SourceTokenizer) -> GlinerFacts:
    transformers_tokenizer = tokenizer.transformers_tokenizer
    vocabulary = transformers_tokenizer.get_vocab()
    marks = [
        vocabulary.get(content.get(name, mark)) for name, mark in (("ent_token", "<<ENT>>"), ("sep_token", "<<SEP>>"))
    ]
    if None in marks or content.get("class_token_index", marks[0]) != marks[0]:
        raise SetupError(
            f"{folder}: {_CONFIG_FILE} names an ent_token, a sep_token or a class_token_index that no token has"
        )
    whole, plain = (transformers_tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (True, False))
    start = next(start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return GlinerFacts(
        label_token_id=marks[0],
        separator_token_id=marks[1],
        before=tuple(whole[:start]),
        behind=tuple(whole[start + len(plain) :]),
        max_width=0 if content["span_mode"] == _OF_TOKENS else content["max_width"],
        max_words=content["max_len"],
    )


def encode_samples(module: SourceModule, texts: Sequence[str]) -> SampleBatch:
    """Encodes the texts behind a few labels as inputs of the model, int64 [batch, tokens] by name."""
    facts = next(facts for facts in module.facts.values() if isinstance(facts, GlinerFacts))
    tokenizer = module.tokenizer.transformers_tokenizer

    def encode(words: Sequence[str]) -> tuple[Any, Any]:
        encoding = tokenizer(list(words), is_split_into_words=True, add_special_tokens=False)
        return np.array(encoding["input_ids"], np.int32), np.array(encoding.word_ids(), np.int32)

    rows = [
        number_words(facts, len(_SAMPLE_LABELS), *encode([*_SAMPLE_LABELS, *(match[0] for match in split(text))]))
        for text in texts
    ]
    rows = [(ids[: module.max_tokens], numbers[: module.max_tokens]) for ids, numbers in rows]
    width = max(len(ids) for ids, _ in rows)
    batch = {
        "input_ids": [_pad_row(ids, width, module.tokenizer.pad_token_id) for ids, _ in rows],
        "attention_mask": [_pad_row(np.ones(len(ids)), width, 0) for ids, _ in rows],
        WORD_NUMBER: [_pad_row(numbers, width, 0) for _, numbers in rows],
    }
    return {name: np.array(arrays, np.int64) for name, arrays in batch.items()}


def _pad_row(row: Any, width: int, value: int) -> Any:
    return np.pad(row, (0, width - len(row)), constant_values=value)
