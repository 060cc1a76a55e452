"""Texts of many scripts and shapes, picked by hand and generated from a seed."""

import pydoc_data.topics
import random
from collections.abc import Sequence

PICKED = (
    "ok",
    "!",
    "  two  spaces \t and\nlines\u00a0 ",
    "The ferry leaves Stockholm at half past nine.",
    "Ada Lovelace was born in London in 1815; Charles Babbage's engine was never built.",
    "PARIS Paris paris",
    "New York-based O'Neill & Sons, Inc. (est. 1974) e-mailed u.s. officials.",
    "Zürich, Łódź, Çeşme, Århus, Reykjavík",
    "Le cafe\u0301 de la Re\u0301publique, Z\u0351\u036b\u0343a\u034clgo",
    "İstanbul'dan ﬁnal ① Ⅷ ｆｕｌｌ width ß ẞ",
    "北京是中华人民共和国的首都。上海是最大的城市。",
    "東京タワーは1958年に建てられた。The tower is 333 metres tall.",
    "서울은 대한민국의 수도이다.",
    "ירושלים היא בירת ישראל, ותל אביב היא העיר הגדולה",
    "القاهرة هي عاصمة مصر، والإسكندرية ميناؤها",
    "दिल्ली भारत की राजधानी है।",
    "👩‍👩‍👧‍👦 went to 🏔️ 👍🏽 🇮🇸, then 3️⃣ 🥇🥇",
    "𐎠𐎡𐎢 ꙮ 𓀀 ᚠᚢᚦ",
    "[CLS] and [SEP] and [UNK][PAD], literally",
    "antidisestablishmentarianism/floccinaucinihilipilification_v2.tar.gz",
    "x" * 120,
    "3.14159 * 2e10 - 0x1F / (a[i] % 7)",
    "https://example.org/path?query=1&other=%20#fragment",
    "a\u200bb\u200cc\u2060d \ufeffe \u202eright to left\u202c",
)

_MANUAL = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).split()
_CHARACTERS = "éüñçøßłžİıŒæ中文字漢東京한국어שלוםمرحباहिन्दीไทย😀👍🏽🏳️‍🌈\u0301\u0308\u200d«»—…“”'\"()[]<>/\\|@#%&*"


def generated(seed: int, count: int, *, words: tuple[int, int] = (1, 40)) -> Sequence[str]:
    """Texts of so many words: those of the Python manual, some of them changed in case, joined, or with strange
    characters inside.
    """
    chosen = random.Random(seed)
    return [" ".join(_word(chosen) for _ in range(chosen.randint(*words))) for _ in range(count)]


def _word(chosen: random.Random) -> str:
    word = chosen.choice(_MANUAL)
    change = chosen.random()
    if change < 0.06:
        return word.upper()
    if change < 0.12:
        return word.capitalize() + chosen.choice(".,;:!?")
    if change < 0.2:
        place = chosen.randint(0, len(word))
        return word[:place] + chosen.choice(_CHARACTERS) + word[place:]
    if change < 0.24:
        return "".join(chosen.choice(_CHARACTERS) for _ in range(chosen.randint(1, 5)))
    return word
