"""No private name of a library is used: the next release may change it without a word.

A name with a leading underscore is a library's where no module of the package defines it. Methods of named tuples are
public in spite of theirs.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import neuronpipe

_PACKAGE = Path(neuronpipe.__file__).parent
_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
_NO_LIST = "argparse has no public list of a parser's options"
_MASKS = "GPT-Neo has one mask for all layers; its own attention is the only place that sees a mask for each layer"
_CONFIG = "transformers has no public form of the attention that a model was loaded with"
# file, name → why there is no public one. The aim is an empty table.
_EXCEPTIONS = {
    ("cli/terminal.py", "_actions"): "argparse has no public list of the arguments of a parser",
    ("cli/terminal.py", "_option_string_actions"): _NO_LIST,
    ("compiler/architectures.py", "_attn"): _MASKS,
    ("compiler/architectures.py", "_apply_gate"): "the gate of experts differs by architecture and is their method",
    ("compiler/architectures.py", "_attn_implementation"): _CONFIG,
    ("compiler/own_graphs.py", "_attn_implementation"): _CONFIG,
    ("compiler/decoding.py", "_relative_position_bucket"): "T5's distances are a private function of its attention",
    ("compiler/pipeline_parallel.py", "_C"): "dead code in a traced graph is removed by a pass without a public name",
    ("compiler/pipeline_parallel.py", "_jit_pass_dce"): "see _C",
    ("compiler/tasks/texts.py", "_compile_jinja_template"): "a template is to be checked as transformers reads it",
    ("stages/neuron_executor/runtimes/openvino.py", "_offline_transformations"): "paged attention has no other form",
}  # fmt: skip


@cache
def _trees() -> dict[str, ast.Module]:
    paths = (path for path in _PACKAGE.rglob("*.py") if not path.stem.endswith(("_pb2", "_pb2_grpc")))
    return {str(path.relative_to(_PACKAGE)): ast.parse(path.read_text()) for path in paths}


def _is_own(receiver: ast.expr) -> bool:
    return isinstance(receiver, ast.Name) and receiver.id in ("self", "cls")


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that a module gives to functions, classes, variables, arguments and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr


def _used(tree: ast.Module) -> Iterator[str]:
    """The private names of attributes, and of modules and names that come from other packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("neuronpipe"):
            yield from [*(node.module or "").split("."), *(name.name for name in node.names)]
        elif isinstance(node, ast.Import):
            yield from (word for name in node.names for word in name.name.split("."))


def test_no_private_name_of_a_library_is_used() -> None:
    own = {name for tree in _trees().values() for name in _defined(tree)}
    foreign = {
        (path, name)
        for path, tree in _trees().items()
        for name in _used(tree)
        if name.startswith("_") and not name.endswith("__") and name not in own | _NAMED_TUPLES
    }
    assert foreign == set(_EXCEPTIONS)
