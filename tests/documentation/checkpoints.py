"""The table of checkpoints in docs/models.md, by their ids on the Hub. docs/checkpoints.json has its rows.

A row has the fields `id`, `family`, `task`, and `millions` of parameters, by the checkpoint's card. It may have:

- `options` of `neuronpipe compile`, where the files do not say everything
- `equals`: the reference that the answers equal, where it is not the reference of the task (EQUALS)
- `case`: the test with a model of this configuration, where it is not the row of `family` and task in docs/models.json
- `reason`: why the checkpoint is refused
- `measured`: number type → difference to PyTorch float32, agreement, and size of the bundle, as compile prints them for
  the published weights (docs/quick-start.md and docs/benchmarks/memory.md have those of MiniLM)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKPOINTS = Path(__file__).parents[2] / "docs" / "checkpoints.json"
# Task → the reference that its answers equal.
EQUALS: Mapping[str, str] = {
    "sentence-embedding": "`SentenceTransformer.encode`",
    "sparse-embedding": "`SparseEncoder.encode`",
    "multi-vector-embedding": "`MultiVectorEncoder.encode_document`",
    "rerank": "`CrossEncoder.rank`",
    "translation": "`generate` of transformers",
    "summarization": "`generate` of transformers",
    "text-generation": "`generate` of transformers",
    "image-embedding": "the model of transformers",
    **{
        task: f'`pipeline("{task}")`'
        for task in (
            "text-classification",
            "zero-shot-classification",
            "token-classification",
            "question-answering",
            "fill-mask",
            "image-classification",
            "zero-shot-image-classification",
        )
    },
}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of all rows, as Markdown."""
    names = ("Checkpoint", "Family", "Task", "Options", "Answers equal", "Parameters, M", "Status")
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n" + "".join(map(_line, rows))


def _line(row: Mapping[str, Any]) -> str:
    options = f"`{row['options']}`" if "options" in row else ""
    equals = "" if "reason" in row else row.get("equals") or EQUALS[row["task"]]
    cells = (f"`{row['id']}`", row["family"], row["task"], options, equals, f"{row['millions']:,}", _status(row))
    return f"| {' | '.join(cells)} |\n"


def _status(row: Mapping[str, Any]) -> str:
    if "reason" in row:
        return f"refused: {row['reason']}"
    if "measured" not in row:
        return "by configuration"
    parts = []
    for name, found in row["measured"].items():
        difference = f"difference {found['difference']:.0e}, " if "difference" in found else ""
        parts.append(f"{name}: {difference}agreement {found['agreement']:.4f}, {found['megabytes']} MB")
    return f"measured. {'; '.join(parts)}"
