"""The question-answering pipeline of transformers 4, which 5 has none of, in the environment that `make setup` gives it.

Run by `ask` there as: python -m tests.oracle.transformers4 JOB.json ANSWERS.json
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_PYTHON = _ROOT / ".venv-transformers4" / "bin" / "python"
_TIME_LIMIT_S = 280


def ask(source: Path, tokenizer: Any, cases: Sequence[Mapping[str, Any]], folder: Path) -> tuple[str, list[list[dict[str, Any]]]]:
    """The version of transformers, and a list of answers for each case (the pipeline's arguments), by the model in `source`.

    `tokenizer`: the model's; the form in which transformers 5 saves one is not read by 4, so it is described anew. Works in `folder`.
    """
    names = {
        **tokenizer.special_tokens_map,
        "model_max_length": tokenizer.model_max_length,
        "model_input_names": tokenizer.model_input_names,
    }
    job, answers = folder / "job.json", folder / "answers.json"
    job.write_text(json.dumps({"source": str(source), "tokenizer": names, "cases": list(cases)}), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "services"), str(_ROOT)])}
    subprocess.run(
        [_PYTHON, "-m", "tests.oracle.transformers4", job, answers], check=True, cwd=_ROOT, env=environment, timeout=_TIME_LIMIT_S
    )
    content = json.loads(answers.read_text(encoding="utf-8"))
    return content["version"], content["answers"]


def main(job: Path, answers: Path) -> None:
    """Answers the questions of a job."""
    import torch
    import transformers

    from tests.contract.golden_question_answering import splitting

    torch.set_num_threads(1)
    content = json.loads(job.read_text(encoding="utf-8"))
    source = Path(content["source"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"), **content["tokenizer"])
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(source)
    pipeline = transformers.pipeline("question-answering", model=model, tokenizer=splitting(tokenizer))
    found = []
    for case in content["cases"]:
        result = pipeline(**case)
        found.append([result] if isinstance(result, dict) else list(result))
    answers.write_text(json.dumps({"version": transformers.__version__, "answers": found}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
