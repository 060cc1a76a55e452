"""The bodies of Hugging Face's inference API, by task: as huggingface_hub's InferenceClient sends them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from neuronpipe.core.generation_options import OPTIONS
from neuronpipe.core.model import with_fields
from neuronpipe.doors.http.body_types import (
    WHOLE,
    Body,
    Count,
    Direction,
    Many,
    ModelBody,
    Whole,
    fixed,
    only,
    option_field,
)
from neuronpipe.doors.http.unknown_fields import HARMLESS


def _refuse_length(value: Any) -> None:
    if value is not None:
        raise ValueError("is not supported, because it counts the prompt; use max_new_tokens or min_new_tokens")


_PromptAndText = Annotated[Any, AfterValidator(_refuse_length), WithJsonSchema({"type": "null"})]
_Texts = str | Many[str]
_Image = Annotated[str, Field(description="a JPEG, PNG or WebP file in Base64; or the file itself as the body")]


class _Options(Body):
    """Options of Hugging Face's own machines. Only `use_cache` has a meaning here."""

    harmless = HARMLESS | {"use_gpu", "wait_for_model", "retry_on_error", "dont_load_model"}

    use_cache: bool | None = Field(None, description="false: the result is computed, and not kept")


class TaskBody(Body):
    """Fields of every body."""

    options: _Options | None = None
    stream: Annotated[Any, only(False)] = None

    @property
    def bypasses_cache(self) -> bool:
        """Whether the answer must not come from the result cache."""
        return self.options is not None and self.options.use_cache is False


class NoParameters(Body):
    """An object without fields, which some clients send for every task."""


class CutParameters(Body):
    # transformers has three strategies that cut, which do the same to a single text.
    truncation: bool | Literal["do_not_truncate", "longest_first", "only_first"] | None = None


class Pair(Body):
    text: str
    text_pair: str


class LabelParameters(CutParameters):
    top_k: Count | None = None
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None


class TextClassification(TaskBody):
    inputs: str | Pair | Many[str | Pair]
    parameters: LabelParameters = LabelParameters()


class ImageClassification(TaskBody):
    inputs: _Image
    parameters: LabelParameters = LabelParameters()


class ImageFeatures(TaskBody):
    inputs: _Image
    parameters: NoParameters = NoParameters()


class ZeroShotImageParameters(CutParameters):
    candidate_labels: Many[str]
    hypothesis_template: str | None = None


class ZeroShotImageClassification(TaskBody):
    inputs: Annotated[str, Field(description="a JPEG, PNG or WebP file in Base64")]
    parameters: ZeroShotImageParameters


class ZeroShotParameters(CutParameters):
    candidate_labels: Many[str] | str
    multi_label: bool = False
    hypothesis_template: str | None = None


class ZeroShotClassification(TaskBody):
    inputs: _Texts
    parameters: ZeroShotParameters


class TokenParameters(CutParameters):
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"
    ignore_labels: Many[str] | None = None
    stride: Count | None = None


class TokenClassification(TaskBody):
    inputs: _Texts
    parameters: TokenParameters = TokenParameters()


class ZeroShotTokenParameters(CutParameters):
    candidate_labels: Many[str]
    threshold: float = 0.5
    flat_ner: bool = True
    multi_label: bool = False


class ZeroShotTokenClassification(TaskBody):
    inputs: _Texts
    parameters: ZeroShotTokenParameters


class FillMaskParameters(CutParameters):
    top_k: Count | None = None
    targets: Many[str] | None = None


class FillMask(TaskBody):
    inputs: _Texts
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


class QuestionAnswering(TaskBody):
    inputs: Question | Many[Question]
    parameters: AnswerParameters = AnswerParameters()


class Features(TaskBody):
    """InferenceClient sends the parameters beside the inputs."""

    inputs: _Texts
    normalize: bool | None = Field(
        None, description="whether vectors of sentence embeddings are scaled to unit length; default: yes"
    )
    dimensions: Count | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = Field(None, description="a prompt of a model of sentence embeddings")
    encoding_format: Literal["float"] | None = None
    parameters: CutParameters = Field(CutParameters(), description="parameters of the pipeline")


class Sentences(Body):
    source_sentence: str
    sentences: Many[str]


class SentenceSimilarity(TaskBody):
    inputs: Sentences
    parameters: CutParameters = CutParameters()


class Query(Body):
    query: str
    texts: Many[str]


class RankParameters(Body):
    top_k: Count | None = None
    function_to_apply: Literal["sigmoid", "none"] | None = None
    truncation: bool | Literal["do_not_truncate", "longest_first"] | None = None


class TextRanking(TaskBody):
    inputs: Query
    parameters: RankParameters = RankParameters()


# Options that are not supported, each with its only accepted value, which does not change the text.
_NEUTRAL = fixed(
    clean_up_tokenization_spaces=False, epsilon_cutoff=0, eta_cutoff=0, num_beam_groups=1, penalty_alpha=0, typical_p=1
)


@with_fields({name: option_field(option) for name, option in OPTIONS.items() if option.huggingface} | _NEUTRAL)
class WritingOptions(CutParameters):
    """Options of transformers' `generate`, with the fields that OPTIONS declares, and options of its pipelines."""

    use_cache: bool | None = Field(None, description="changes nothing")

    def option(self, name: str) -> Any:
        """Returns an option that is declared; None if it is not given."""
        return getattr(self, name)


class Grammar(Body):
    """The form that a text must have: a regular expression, or a JSON Schema, also within an object as OpenAI's."""

    type: Literal["json", "json_schema", "regex"]
    value: str | dict[str, Any]


@with_fields(fixed(best_of=1, decoder_input_details=False, ignore_eos_token=False, top_n_tokens=0, watermark=False))
class GenerateParameters(WritingOptions):
    """The parameters of a text, also for TGI. Without a parameter of sampling, the most probable tokens are taken."""

    return_full_text: bool | None = Field(None, description="whether the text begins with the prompt; default: no")
    stop: Many[str] | None = None
    stop_sequences: Many[str] | None = None
    details: bool | None = None
    max_length: _PromptAndText = None
    min_length: _PromptAndText = None
    grammar: Grammar | None = None
    truncate: Count | None = Field(None, description="number of tokens that are kept of the end of the prompt")


class Prompted(Body):
    parameters: GenerateParameters = GenerateParameters()


class Generate(Prompted, ModelBody):
    inputs: str
    stream: bool | None = Field(None, description="whether the path is /generate_stream")


class TextGeneration(Prompted, TaskBody):
    inputs: _Texts
    stream: bool | None = Field(None, description="one text as server-sent events, an event for each token")


class SummaryOptions(WritingOptions):
    """`max_length` and `min_length` count the token that the text follows."""

    max_length: Annotated[int, Field(ge=2, lt=1 << 32), WHOLE] | None = None
    min_length: Whole | None = None


class SummaryParameters(SummaryOptions):
    """Options are fields, as in the pipelines, or fields of `generate_parameters`, as in InferenceClient."""

    generate_parameters: SummaryOptions = SummaryOptions()


class Summarization(TaskBody):
    inputs: _Texts
    parameters: SummaryParameters = SummaryParameters()


class TranslationParameters(SummaryParameters):
    src_lang: str | None = None
    tgt_lang: str | None = None


class Translation(TaskBody):
    inputs: _Texts
    parameters: TranslationParameters = TranslationParameters()
