"""The pipelines of transformers 4 that 5 has none of (question-answering, summarization, translation), in the
environment that `make setup` gives it.

Run by `ask` there as: python -m tests.oracle.transformers4 JOB.json ANSWERS.json
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

_ROOT = Path(__file__).parents[2]
_PYTHON = _ROOT / ".venv-transformers4" / "bin" / "python"
_TIME_LIMIT_S = 280


Answers: TypeAlias = list[list[dict[str, Any]]]


def ask(
    models: Mapping[str, tuple[Path, Any]],
    cases: Sequence[Mapping[str, Any]],
    folder: Path,
    task: str = "question-answering",
) -> tuple[str, dict[str, Answers]]:
    """The version of transformers, and by each model a list of answers for each case (the pipeline's arguments).

    A model is its source with its tokenizer; the form in which transformers 5 saves one is not read by 4, so it is
    described anew. Works in `folder`.
    """
    described = {
        name: {"source": str(source), "tokenizer": _describe(tokenizer)} for name, (source, tokenizer) in models.items()
    }
    job, answers = folder / "job.json", folder / "answers.json"
    job.write_text(json.dumps({"task": task, "models": described, "cases": list(cases)}), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "services"), str(_ROOT)])}
    subprocess.run(
        [_PYTHON, "-m", "tests.oracle.transformers4", job, answers],
        check=True,
        cwd=_ROOT,
        env=environment,
        timeout=_TIME_LIMIT_S,
    )
    content = json.loads(answers.read_text(encoding="utf-8"))
    return content["version"], content["answers"]


def _describe(tokenizer: Any) -> dict[str, Any]:
    return {
        **tokenizer.special_tokens_map,
        "model_max_length": tokenizer.model_max_length,
        "model_input_names": tokenizer.model_input_names,
    }


def main(job: Path, answers: Path) -> None:
    """Answers the cases of a job."""
    import torch
    import transformers

    from tests.contract.golden_question_answering import splitting

    torch.set_num_threads(1)
    content = json.loads(job.read_text(encoding="utf-8"))
    found: dict[str, Answers] = {}
    for name, described in content["models"].items():
        source = Path(described["source"])
        if (source / "tokenizer.json").exists():
            file = str(source / "tokenizer.json")
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file, **described["tokenizer"])
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        if content["task"] == "question-answering":
            model = transformers.AutoModelForQuestionAnswering.from_pretrained(source)
            pipeline = transformers.pipeline("question-answering", model=model, tokenizer=splitting(tokenizer))
            results = [pipeline(**case) for case in content["cases"]]
        else:
            model = transformers.AutoModelForSeq2SeqLM.from_pretrained(source)
            pipeline = transformers.pipeline(content["task"], model=model, tokenizer=tokenizer)
            results = [pipeline(case["text"], truncation=True, **case["options"]) for case in content["cases"]]
        found[name] = [[result] if isinstance(result, dict) else list(result) for result in results]
    answers.write_text(json.dumps({"version": transformers.__version__, "answers": found}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
