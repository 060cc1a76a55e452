"""The bodies of Hugging Face's inference API, by task: as huggingface_hub's InferenceClient sends them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from neuronpipe.core.generation_options import OPTIONS
from neuronpipe.core.model import with_fields
from neuronpipe.doors.http.bodies import (
    HARMLESS,
    WHOLE,
    Body,
    Count,
    Direction,
    Many,
    Whole,
    only,
    option_field,
)


def _refuse_length(value: Any) -> None:
    if value is not None:
        raise ValueError("is not supported, since it counts the prompt; use max_new_tokens or min_new_tokens")


_PromptAndText = Annotated[Any, AfterValidator(_refuse_length), WithJsonSchema({"type": "null"})]


# Of a text alone, the strategies of transformers that cut are the same.
Cuts = bool | Literal["do_not_truncate", "longest_first", "only_first"]


class _Asked(Body):
    """What all have. `options` of Hugging Face's API are for its own machines."""

    options: "_Options | None" = None
    stream: Annotated[Any, only(False)] = None


class _Options(Body):
    use_cache: bool | None = None
    use_gpu: bool | None = None
    wait_for_model: bool | None = None
    retry_on_error: bool | None = None
    dont_load_model: bool | None = None


class Pair(Body):
    text: str
    text_pair: str


class LabelParameters(Body):
    top_k: Count | None = None
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None
    truncation: Cuts | None = None


class TextClassification(_Asked):
    inputs: str | Pair | Many[str | Pair]
    parameters: LabelParameters = LabelParameters()


class ImageClassification(_Asked):
    inputs: Annotated[str, Field(description="a JPEG, PNG or WebP file in Base64; or the file itself as the body")]
    parameters: LabelParameters = LabelParameters()


class NoParameters(Body):
    """An object without fields, which some clients send for every task."""


class ImageFeatures(_Asked):
    inputs: Annotated[str, Field(description="a JPEG, PNG or WebP file in Base64; or the file itself as the body")]
    parameters: NoParameters = NoParameters()


class ZeroShotImageParameters(Body):
    candidate_labels: Many[str]
    hypothesis_template: str | None = None
    truncation: Cuts | None = Field(None, description="of the labels' texts")


class ZeroShotImageClassification(_Asked):
    inputs: Annotated[str, Field(description="a JPEG, PNG or WebP file in Base64")]
    parameters: ZeroShotImageParameters


class ZeroShotParameters(Body):
    candidate_labels: Many[str] | str
    multi_label: bool = False
    hypothesis_template: str | None = None
    truncation: Cuts | None = None


class ZeroShotClassification(_Asked):
    inputs: str | Many[str]
    parameters: ZeroShotParameters


class TokenParameters(Body):
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"
    ignore_labels: Many[str] | None = None
    stride: Count | None = None
    truncation: Cuts | None = None


class TokenClassification(_Asked):
    inputs: str | Many[str]
    parameters: TokenParameters = TokenParameters()


class FillMaskParameters(Body):
    top_k: Count | None = None
    targets: Many[str] | None = None
    truncation: Cuts | None = None


class FillMask(_Asked):
    inputs: str | Many[str]
    parameters: FillMaskParameters = FillMaskParameters()


class Question(Body):
    harmless = HARMLESS | {"id"}

    question: str
    context: str


class AnswerParameters(Body):
    top_k: Count | None = None
    max_answer_len: Count | None = None
    doc_stride: Count | None = None
    handle_impossible_answer: bool = False
    align_to_words: Literal[True] | None = Field(None, description="answers are whole words")


class QuestionAnswering(_Asked):
    inputs: Question | Many[Question]
    parameters: AnswerParameters = AnswerParameters()


class FeatureParameters(Body):
    truncation: Cuts | None = None


class Features(_Asked):
    """Its parameters are beside the inputs, as in InferenceClient."""

    inputs: str | Many[str]
    normalize: bool | None = Field(
        None, description="of models of sentence embeddings: whether vectors have length one; default: yes"
    )
    dimensions: Count | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = Field(None, description="of models of sentence embeddings: one of their prompts")
    encoding_format: Literal["float"] | None = None
    parameters: FeatureParameters = Field(FeatureParameters(), description="as of the pipeline")


class Sentences(Body):
    source_sentence: str
    sentences: Many[str]


class SimilarityParameters(Body):
    truncation: Cuts | None = None


class SentenceSimilarity(_Asked):
    inputs: Sentences
    parameters: SimilarityParameters = SimilarityParameters()


class Query(Body):
    query: str
    texts: Many[str]


class RankParameters(Body):
    top_k: Count | None = None
    function_to_apply: Literal["sigmoid", "none"] | None = None
    truncation: bool | Literal["do_not_truncate", "longest_first"] | None = None


class TextRanking(_Asked):
    inputs: Query
    parameters: RankParameters = RankParameters()


@with_fields({name: option_field(one) for name, one in OPTIONS.items() if one.huggingface})
class WritingOptions(Body):
    """Those of transformers' `generate` are made of their declarations; these are what pipelines have beside them."""

    truncation: Cuts | None = None
    clean_up_tokenization_spaces: Annotated[Any, only(False)] = None
    use_cache: bool | None = Field(None, description="changes nothing")
    # What leaves a text as it is.
    epsilon_cutoff: Annotated[Any, only(0)] = None
    eta_cutoff: Annotated[Any, only(0)] = None
    num_beam_groups: Annotated[Any, only(1)] = None
    penalty_alpha: Annotated[Any, only(0)] = None
    typical_p: Annotated[Any, only(1)] = None

    def option(self, name: str) -> Any:
        """An option that is declared; None where it is not given."""
        return getattr(self, name)


class Grammar(Body):
    """The form that a text must have: its JSON Schema, also within an object as OpenAI's, or a regular expression."""

    type: Literal["json", "json_schema", "regex"]
    value: str | dict[str, Any]


class GenerateParameters(WritingOptions):
    """TGI's, too. Without any of those of sampling, the most probable tokens are taken."""

    return_full_text: bool | None = Field(None, description="the prompt before the text; default: no")
    stop: Many[str] | None = None
    stop_sequences: Many[str] | None = None
    details: bool | None = None
    max_length: _PromptAndText = None
    min_length: _PromptAndText = None
    best_of: Annotated[Any, only(1)] = None
    decoder_input_details: Annotated[Any, only(False)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    grammar: Grammar | None = None
    ignore_eos_token: Annotated[Any, only(False)] = None
    top_n_tokens: Annotated[Any, only(0)] = None
    truncate: Count | None = Field(None, description="the most tokens of the end of the prompt")
    watermark: Annotated[Any, only(False)] = None


class TextGeneration(_Asked):
    inputs: str | Many[str]
    parameters: GenerateParameters = GenerateParameters()
    stream: bool | None = Field(None, description="one text as server-sent events, an event for each token")


class SummaryOptions(WritingOptions):
    """`max_length` and `min_length` count the token that the text follows."""

    max_length: Annotated[int, Field(ge=2, lt=1 << 32), WHOLE] | None = None
    min_length: Whole | None = None


class SummaryParameters(SummaryOptions):
    """Options stand here, as of the pipelines, or in `generate_parameters`, as of InferenceClient."""

    generate_parameters: SummaryOptions = SummaryOptions()


class Summarization(_Asked):
    inputs: str | Many[str]
    parameters: SummaryParameters = SummaryParameters()


class TranslationParameters(SummaryParameters):
    src_lang: str | None = None
    tgt_lang: str | None = None


class Translation(_Asked):
    inputs: str | Many[str]
    parameters: TranslationParameters = TranslationParameters()


# Any of the bodies. The type for a model depends on its task.
AnyBody = (
    TextClassification
    | ImageClassification
    | ImageFeatures
    | ZeroShotImageClassification
    | ZeroShotClassification
    | TokenClassification
    | FillMask
    | QuestionAnswering
    | Features
    | SentenceSimilarity
    | TextRanking
    | TextGeneration
    | Summarization
    | Translation
)
