"""The JSON Schema Test Suite (draft 2020-12): a text that a schema does not allow cannot be written.

A schema is followed exactly, or refused. Which keywords are refused is a table here, and in docs/generation.md. Some
valid texts cannot be written: numbers like 1.0 where 1 is meant, properties in another order than the schema's, and
strings that are not of the schema's `format`, which the standard does not enforce. Whether items repeat is up to the
model: schemas with `uniqueItems` are left out here.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.errors import InvalidInput
from neuronpipe.stages.neuron_executor.generation.grammars import Grammars, TextGrammar
from tests.models.tokenizers import byte_level_bpe
from tests.unit.model_specs import model_spec

_GROUPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "json_schema_suite.json").read_text())["groups"]
# Files of the suite, by keyword, of which no schema is followed: each holds keywords that are refused, or `true` and
# `false` as whole schemas, or refers to other documents.
_REFUSED = {
    *("boolean_schema", "contains", "defs", "dependentRequired", "dependentSchemas", "dynamicRef", "if-then-else"),
    *("maxContains", "minContains", "not", "propertyNames", "refRemote", "unevaluatedItems", "unevaluatedProperties"),
    *("uniqueItems", "vocabulary"),
}


async def _grammar(grammars: Grammars, schema: Any) -> TextGrammar | None:
    """None for a schema that is refused, or left out."""
    if "uniqueItems" in json.dumps(schema):
        return None
    try:
        return await grammars.grammar_for(GenerationOptions(json_schema=json.dumps(schema)))
    except InvalidInput:
        return None


def _can_write(grammar: TextGrammar, tokenizer: Tokenizer, end: int, data: Any) -> bool:
    """Whether the text of the data, without white space, is one that the grammar allows."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(token_ids) == text
    followed = grammar.copy()
    try:
        return all(followed.allowed(token_ids[:count])[token_id] for count, token_id in enumerate([*token_ids, end]))
    except InvalidInput:
        return False


async def test_what_a_schema_does_not_allow_cannot_be_written() -> None:
    trained = byte_level_bpe(max_tokens=192)
    tokenizer, end = trained.backend_tokenizer, trained.eos_token_id
    spec = model_spec("text_generation", vocabulary_size=len(trained), end_token_ids=(end,))
    grammars = Grammars(spec, lambda: tokenizer.to_str().encode())
    wrong, counts, followed = [], Counter[str](), set()
    for group in _GROUPS:
        grammar = await _grammar(grammars, group["schema"])
        counts["refused" if grammar is None else "followed"] += 1
        if grammar is None:
            continue
        for data, is_valid in group["tests"]:
            followed.add(group["keyword"])
            can_write = _can_write(grammar, tokenizer, end, data)
            counts[f"{'valid' if is_valid else 'wrong'} and {'written' if can_write else 'not written'}"] += 1
            if can_write and not is_valid:
                wrong.append((group["keyword"], group["description"], data))
    grammars.close()
    assert wrong == []
    assert followed == {group["keyword"] for group in _GROUPS} - _REFUSED
    assert counts == {
        "followed": 163,
        "refused": 205,
        "valid and written": 321,
        "valid and not written": 22,
        "wrong and not written": counts["wrong and not written"],
    }
    assert counts["wrong and not written"] > 200
