"""Sparse models with a Router: a model weighs documents, and a table weighs the tokens of queries without inference.

The folder of the documents' side is compiled as any sparse model. Sources: sentence-transformers 6, router.py and
sparse_static_embedding.py; the files of opensearch-neural-sparse-encoding-doc-v3, whose document side is the root.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from neuronpipe.compiler.saved_files import read_object, refusing
from neuronpipe.compiler.sentence_transformers import read_modules, read_tensors
from neuronpipe.compiler.tokenizers import SourceTokenizer, load_tokenizer
from neuronpipe.core.errors import SetupError

_FILE = "router_config.json"
_QUERY, _DOCUMENT = "query", "document"
SIDES = (_QUERY, _DOCUMENT)
_QUERY_SIDE = "query_side.json"
# Parts of tokenizer.json that decide which tokens a text has. Special tokens around it are no part of a query.
_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "model")


@dataclass(frozen=True, slots=True)
class Router:
    """The modules of each side, each a class and a folder, and the side of inputs that name none."""

    modules: Mapping[str, Sequence[tuple[str, Path]]]
    default_side: str


def read_router(folder: Path) -> Router | None:
    """Reads a model's Router; None for other models. Raises SetupError for a Router of other kinds of modules."""
    modules = read_modules(folder)
    if not modules or modules[0][0] != "Router":
        return None
    place = modules[0][1]
    content = read_object(place / _FILE if (place / _FILE).is_file() else place / "config.json")
    with refusing(f"{folder}: the settings of its Router cannot be read", advice="; get its files again"):
        types, structure, parameters = content["types"], content["structure"], content.get("parameters") or {}
        sides = {
            str(side): [(str(types[name]).rpartition(".")[2], place / name) for name in names]
            for side, names in structure.items()
        }
    shown = "; ".join(f"{side} by {', '.join(kind for kind, _ in sides[side])}" for side in sides)
    if {*sides} != {*SIDES} or [kind for kind, _ in sides[_QUERY]] != ["SparseStaticEmbedding"]:
        raise SetupError(
            f"{folder}: is a Router of {shown}; supported are {_QUERY} by SparseStaticEmbedding and {_DOCUMENT} by a "
            "transformer with SpladePooling; compile each side of others as a model of its own"
        )
    if others := ", ".join(
        [kind for kind, _ in modules[1:]] + ["route_mappings"] * bool(parameters.get("route_mappings"))
    ):
        raise SetupError(f"{folder}: is a Router with {others}, which is not supported")
    default = parameters.get("default_route")
    if not default:  # sentence-transformers takes the first side, if it may
        default = next(iter(sides)) if parameters.get("allow_empty_key", True) else _DOCUMENT
    return Router(sides, str(default))


def write_document_side(source: Path, router: Router, folder: Path) -> None:
    """Makes the documents' modules the modules of `folder`, which has links to the files of `source`."""
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": str(path.relative_to(source))}
        for kind, path in router.modules[_DOCUMENT]
    ]
    ((_, query),) = router.modules[_QUERY]
    side = {"path": str(query.relative_to(source)), "default_side": router.default_side}
    (folder / "modules.json").unlink()  # a link: writing would change the file of the source
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / _QUERY_SIDE).write_text(json.dumps(side))


@dataclass(frozen=True, slots=True)
class QuerySide:
    """The queries of a Router, which the tokenizer alone answers: their prompts and the weights of tokens."""

    query_prompts: tuple[str, ...] = ()
    query_weights: tuple[float, ...] = ()


def read_query_side(folder: Path, tokenizer: SourceTokenizer, vocabulary_size: int) -> QuerySide:
    """Reads the queries of a folder of write_document_side; none for other folders. Raises SetupError."""
    side = read_object(folder / _QUERY_SIDE, may_lack=True)
    if not side:
        return QuerySide()
    query = folder / side["path"]
    of_queries, of_documents = (json.loads(written) for written in (load_tokenizer(query).json, tokenizer.json))
    if different := ", ".join(part for part in _PARTS if of_queries.get(part) != of_documents.get(part)):
        raise SetupError(f"{query}: its tokenizer.json has another {different} than that of documents, not supported")
    weights = torch.zeros(vocabulary_size)
    table = _read_weights(folder, query, tokenizer)
    if table.ndim != 1 or len(table) > vocabulary_size:
        raise SetupError(f"{query}: has weights {list(table.shape)} for a vocabulary of {vocabulary_size} tokens")
    weights[: len(table)] = table
    names = (_QUERY, "") if side["default_side"] == _QUERY else (_QUERY,)
    # Nine digits are every digit of float32.
    return QuerySide(names, tuple(float(f"{weight:.9g}") for weight in weights.tolist()))


def _read_weights(folder: Path, query: Path, tokenizer: SourceTokenizer) -> torch.Tensor:
    """Reads the weight of each token, from a file of weights by token or from a tensor."""
    name = str(read_object(query / "config.json", may_lack=True).get("path") or "")
    with refusing(f"{query}: its weights of tokens cannot be read", advice="; get its files again"):
        if name.endswith(".json"):
            paths = [place / Path(name).name for place in (query, folder)]
            by_token = read_object(next((path for path in paths if path.is_file()), paths[0]))
            ids = tokenizer.transformers_tokenizer.convert_tokens_to_ids([*by_token])
            weights = torch.zeros(max(ids) + 1)
            weights[ids] = torch.tensor([*by_token.values()], dtype=torch.float32)
            return weights
        return read_tensors(query)["weight"].float()
