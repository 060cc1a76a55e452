"""Makes golden/question_answering.json: what the question-answering pipeline of transformers 4 answers with the model
`answerer`.

transformers 5 has no such pipeline any more, so the reference runs in an environment of its own, and its answers are
kept.

Run: .venv-transformers4/bin/python -m tests.contract.golden_question_answering
"""

import hashlib
import itertools
import json
import platform
import pydoc_data.topics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers
import torch
import transformers

from tests.models.repository import answerer

GOLDEN_FILE = Path(__file__).parent / "golden" / "question_answering.json"

# Answers of scores nearer than this may change places between two correct implementations, which round differently; and
# so may the last answer and the first that is left out. No case has such a pair.
SMALLEST_GAP = 2e-3

_SENTENCE = "The harbour master counted forty-seven boats before the storm, and sixteen after it. "
_CONTEXTS = {
    "one word": "Reykjavík",
    "one token": "a",
    "one sentence": "The ferry leaves Stockholm at half past nine and arrives in Mariehamn in the afternoon.",
    "paragraph": (
        "Ada Lovelace was born in London in 1815. She wrote the first program for Charles Babbage's analytical "
        "engine, which was "
        "never built; her notes, printed in 1843, explain how it would compute Bernoulli numbers."
    ),
    "whitespace": "  \t The key\u00a0is   under\n\n\nthe mat ,   beside\r\nthe door .  \n",
    "emoji": "The 👩‍👩‍👧‍👦 family took the 🚂 to 🏔️ and sent 👍🏽 to everyone; then 🇮🇸🇳🇴 won 3️⃣ medals 🥇🥇.",
    "combining characters": (
        "Le cafe\u0301 de la Re\u0301publique fut construit a\u0300 Orle\u0301ans; Z\u0351\u036b\u0343a\u034clgo lived "
        "n\u0303ext door."
    ),
    "accents": "Der Bürgermeister von Tübingen heißt Özgür Çelik, sein Vorgänger war Łukasz Żółtowski aus Kraków.",
    "chinese": "北京是中华人民共和国的首都。上海是最大的城市，人口超过两千四百万。",
    "japanese and english": "東京タワーは1958年に建てられた。The tower is 333 metres tall, 東京スカイツリー is 634.",
    "korean": "서울은 대한민국의 수도이다. 부산은 두 번째로 큰 도시이다.",
    "hebrew": "ירושלים היא בירת ישראל, ותל אביב היא העיר הגדולה בחוף הים התיכון.",
    "arabic": "القاهرة هي عاصمة مصر، والإسكندرية ميناؤها الأكبر على البحر المتوسط.",
    "devanagari": "दिल्ली भारत की राजधानी है, और मुंबई उसका सबसे बड़ा शहर है।",
    "outside the vocabulary": "𐎠𐎡𐎢 𐎣𐎤𐎥 ꙮꙮ 𓀀𓀁𓀂 ᚠᚢᚦᚨᚱᚲ",
    "literal special tokens": "The first token is [CLS] and the parts end with [SEP] as in [CLS] one [SEP] two [SEP]; "
    "padding is [PAD].",
    "literal unknown and mask": "Models of this kind replace a word by [MASK] and a strange one by [UNK] before "
    "they read it.",
    "long words": "The file "
    + "x" * 120
    + " and antidisestablishmentarianism/floccinaucinihilipilification_v2.tar.gz are gone.",
    "code": "for (i = 0; i < n; ++i) { total += prices[i] * (1.0 - discount); }  /* O(n) */",
    "capitals": "PARIS is not Paris, and paris is neither; Paris, PARIS and paris are three towns in Texas, "
    "Ontario and Idaho.",
    "repeated sentence": _SENTENCE * 60,
    "repeated in capitals": (_SENTENCE + _SENTENCE.upper()) * 25,
}
# Real English of several windows: this many words of a page of Python's manual, from this word on.
_SLICES = {
    "300 words": ("types", 0, 300),
    "500 words": ("specialnames", 100, 500),
    "900 words": ("import", 0, 900),
    "2000 words": ("compound", 0, 2000),
}
_QUESTIONS = (
    "Where is it?",
    "Who did what, and when?",
    "What happens to an object when nothing refers to it any more?",
    "¿Qué número – 数字 – 🤔?",
    "What does [SEP] mean?",
    "In which of the many places that were named before, and by whom, and for what reason, was the thing that this "
    "rather long "
    "question asks for, which nobody has seen since the summer of the year in which the old bridge over the river "
    "fell down, and "
    "which some say was never there at all, last seen, heard of, or written about by somebody who can be believed "
    "without doubt?",
)
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 3},
    {"top_k": 10},
    {"top_k": 3, "handle_impossible_answer": True},
    {"handle_impossible_answer": True},
    {"top_k": 10, "max_answer_len": 1},
    {"top_k": 3, "max_answer_len": 4, "handle_impossible_answer": True},
    {"top_k": 10, "max_answer_len": 60},
    {"top_k": 3, "max_answer_len": 500},
)
_STRIDES = (16, 200, 64)
# More answers than a text of a few different words has, so that "no answer" is one of them, over several windows.
_ALL_WORDS = {"top_k": 40, "max_answer_len": 1, "handle_impossible_answer": True}


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every context with every set of options; questions, and for contexts of several windows strides, take turns."""
    for number, name in enumerate(contexts()):
        for turn, options in enumerate(_OPTIONS):
            question = _QUESTIONS[(number + turn) % len(_QUESTIONS)]
            yield name, question, options
            if name in _SLICES or name.startswith("repeated"):
                yield name, question, {**options, "doc_stride": _STRIDES[turn % len(_STRIDES)]}
    for question in _QUESTIONS:
        yield "repeated sentence", question, _ALL_WORDS


def contexts() -> dict[str, str]:
    """The contexts by name."""
    return _CONTEXTS | {name: _words(*part) for name, part in _SLICES.items()}


def _words(topic: str, first: int, count: int) -> str:
    # Lines and indentation stay as they are.
    text = pydoc_data.topics.topics[topic]
    words = text.split()[first : first + count]
    start = position = text.index(words[0]) if not first else len(text) - len(text.split(None, first)[-1])
    for word in words:
        position = text.index(word, position) + len(word)
    return text[start:position]


def splitting(tokenizer: Any) -> Any:
    """The tokenizer, changed so that special tokens in a text are text, as they are here. transformers 4 has no other
    way for pipelines.
    """

    class Splitting(type(tokenizer)):  # type: ignore[misc]
        def _batch_encode_plus(self, *args: Any, **options: Any) -> Any:
            return super()._batch_encode_plus(*args, **{**options, "split_special_tokens": True})

    tokenizer.__class__ = Splitting
    return tokenizer


def weights_digest(folder: Path) -> str:
    """A digest of a model's weights, whatever the order of the file that they are in."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _has_gaps(pipeline: Any, question: str, context: str, options: dict[str, Any]) -> bool:
    """Whether the first top_k answers, and the one after them, are so far apart that rounding cannot change their
    order.
    """
    top_k = options.get("top_k", 1)
    # One answer more also means two candidates more a window, which is little enough to leave the scores of the first
    # as they are.
    scores = [answer["score"] for answer in _answers(pipeline, question, context, {**options, "top_k": top_k + 1})]
    return all(below <= above * (1 - SMALLEST_GAP) for above, below in itertools.pairwise(scores) if above > 0)


def _answers(pipeline: Any, question: str, context: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    result = pipeline(question=question, context=context, **options)
    return [result] if isinstance(result, dict) else list(result)


def main() -> None:
    """Writes the golden file."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = answerer(Path(temporary))
        digest = weights_digest(folder)
        pipeline = transformers.pipeline(
            "question-answering",
            model=str(folder),
            tokenizer=splitting(transformers.AutoTokenizer.from_pretrained(folder)),
        )
        recorded, skipped = [], 0
        for name, question, options in cases():
            if not _has_gaps(pipeline, question, contexts()[name], options):
                skipped += 1
                continue
            answers = [
                {"text": answer["answer"], "start": answer["start"], "end": answer["end"], "score": answer["score"]}
                for answer in _answers(pipeline, question, contexts()[name], options)
            ]
            recorded.append({"context": name, "question": question, "options": options, "answers": answers})
    content = {
        "made_by": "python -m tests.contract.golden_question_answering",
        "reference": 'transformers.pipeline("question-answering") with the model `answerer` of '
        "tests/models/repository.py, special tokens split",
        "versions": {
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "weights_sha256": digest,
        "contexts": contexts(),
        "cases": recorded,
    }
    lines = json.dumps({**content, "cases": []}, ensure_ascii=False, indent=1).removesuffix("[]\n}")
    written = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in recorded)
    GOLDEN_FILE.parent.mkdir(exist_ok=True)
    GOLDEN_FILE.write_text(f"{lines}[\n{written}\n ]\n}}\n", encoding="utf-8")
    print(
        f"{GOLDEN_FILE}: {len(recorded)} cases; {skipped} left out, whose answers are too close together to "
        "have an order"
    )


if __name__ == "__main__":
    main()
