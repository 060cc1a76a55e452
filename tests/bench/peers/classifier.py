"""The model as a person writes it with transformers and torch: what LitServe, Ray Serve and Triton run."""

from collections.abc import Sequence

import torch
import transformers

MAX_TOKENS = 128


class Classifier:
    """Text classification in float32 on the CPU. One call is one batch, padded to its longest text."""

    def __init__(self, source: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        self._model = transformers.AutoModelForSequenceClassification.from_pretrained(
            source, dtype=torch.float32
        ).eval()

    def __call__(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        """(likeliest label, its probability) of each text."""
        inputs = self._tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            scores, indices = self._model(**inputs).logits.softmax(-1).max(-1)
        labels = self._model.config.id2label
        return [(labels[index], score) for index, score in zip(indices.tolist(), scores.tolist(), strict=True)]
