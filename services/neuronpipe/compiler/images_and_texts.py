"""Models that make comparable vectors of images and texts: both parts as one graph.

Sources: transformers 5, CLIPModel and SiglipModel; the pipeline for zero-shot-image-classification.
"""

from pathlib import Path
from typing import Any

import torch

from neuronpipe.compiler.empty_batches import EmptyBatches
from neuronpipe.compiler.image_processors import Normalize
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.zero_shot_image_classification import ImageTextFacts

# Kinds whose scores and texts are known to be what is written here.
IMAGE_TEXT_KINDS = ("clip", "siglip")


class ImagesAndTexts(torch.nn.Module):
    """Vectors of texts and of images, in the order of `places` [batch], which counts the texts and then the images.

    There may be no text, or no image: then its part of the model computes nothing.
    """

    def __init__(self, model: Any, normalize: Normalize, tokenizer: SourceTokenizer) -> None:
        super().__init__()
        self.model = model
        self.normalize = normalize
        self._is_causal = model.config.model_type == "clip"
        self._tokens = int(model.config.text_config.max_position_embeddings)
        self._pad_token_id = tokenizer.pad_token_id

    def forward(self, input_ids: torch.Tensor, pixels: torch.Tensor, places: torch.Tensor) -> dict[str, torch.Tensor]:
        pixel_values = self.normalize(pixels).to(next(self.model.parameters()).dtype)
        with EmptyBatches():
            images = self.model.get_image_features(pixel_values=pixel_values).pooler_output
            texts = self._texts_of(input_ids).pooler_output
        return {"embedding": torch.cat([texts, images]).index_select(0, places)}

    def _texts_of(self, input_ids: torch.Tensor) -> Any:
        if self._is_causal:
            # What follows a text's end is not seen, padding included. transformers makes no mask where it knows the
            # length, which a trace would keep for ever.
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            dtype = next(self.model.parameters()).dtype
            is_seen = positions[:, None] >= positions[None, :]
            mask = torch.where(is_seen, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]
            return self.model.get_text_features(input_ids=input_ids, attention_mask=mask)
        # SigLIP was trained on texts padded to its full length, whose last token gives the vector.
        padding = input_ids.new_full((input_ids.shape[0], self._tokens), self._pad_token_id)
        return self.model.get_text_features(input_ids=torch.cat([input_ids, padding], 1)[:, : self._tokens])


def image_text_facts(folder: Path, model: Any) -> ImageTextFacts:
    """How the model makes a score of a cosine. Raises SetupError if its files do not say."""
    parameters = [model.logit_scale] + ([model.logit_bias] if model.config.model_type == "siglip" else [])
    if any(one.requires_grad for one in parameters):  # as load_weights marks what the files lack
        raise SetupError(f"{folder}: its weights lack logit_scale or logit_bias, without which it has no scores")
    scale, shift = float(model.logit_scale.exp()), sum(float(one) for one in parameters[1:])
    return ImageTextFacts(scale=scale, shift=shift, function="softmax" if len(parameters) == 1 else "sigmoid")


def check_texts(folder: Path, model: Any, tokenizer: SourceTokenizer) -> None:
    """Raises SetupError for a tokenizer whose texts the graph would read otherwise than transformers."""
    if model.config.model_type == "siglip" and "attention_mask" in tokenizer.input_names:
        raise SetupError(
            f"{folder}: its tokenizer masks padding (model_input_names has attention_mask), with which SigLIP was not "
            "trained; leave attention_mask out of model_input_names in tokenizer_config.json"
        )
