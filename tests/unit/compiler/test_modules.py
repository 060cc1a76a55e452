"""compiler/modules.py."""

from typing import Any

import pytest
from transformers import BertConfig

from neuronpipe.compiler.modules import classifier_facts
from neuronpipe.core.errors import SetupError


def _config(**changes: Any) -> BertConfig:
    return BertConfig(
        id2label={0: "fine", 1: "insult", 2: "threat"}, label2id={"fine": 0, "insult": 1, "threat": 2}, **changes
    )


def test_categories_of_moderation_come_from_the_configuration() -> None:
    categories = {"insult": "harassment", "threat": "harassment/threatening"}
    assert classifier_facts(_config(moderation_categories=categories)).moderation_categories == categories
    assert classifier_facts(_config()).moderation_categories == {}


@pytest.mark.parametrize("categories", [{"other": "hate"}, ["insult"], "insult", 3], ids=str)
def test_categories_of_other_labels_are_refused(categories: object) -> None:
    with pytest.raises(SetupError, match="moderation_categories"):
        classifier_facts(_config(moderation_categories=categories))
