"""The options of commands that call a gateway: its address, TLS, the key, and the request by flags or as JSON."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from neuronpipe.cli.terminal import complete_at_file, completed_by, option, read_bytes, read_lines, read_text, seconds
from neuronpipe.core.addresses import check_target
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.task_inputs import FIELDS, NEEDED, SAMPLES, FieldKind

if TYPE_CHECKING:
    from neuronpipe.api.v1.inference_pb2 import InferRequest
    from neuronpipe.api.v1.models_pb2 import Model
    from neuronpipe.api.v1.tasks_pb2 import TaskInput
    from neuronpipe.client import Client
    from neuronpipe.platform.tls import TlsFiles

# A day. Far larger numbers overflow in gRPC and count as a deadline that has passed.
_MAX_TIMEOUT_S = 86_400
# Short, because a person waits for completion in a shell.
_COMPLETION_LIMIT_S = 1.0
_MAX_UINT32 = 2**32 - 1
# The address of `neuronpipe run` and the examples.
_DEFAULT_TARGET = "127.0.0.1:50050"
_TARGET_VARIABLE = "NEURONPIPE_TARGET"
# Several values of these fields are several inputs.
_REPEATED = ("text", "image")


def add_tls(parser: argparse.ArgumentParser) -> None:
    """Adds the options that tls_files reads."""
    option(parser, "--tls-ca FILE", "connect by TLS; the authorities of the server's certificate, in PEM form", "")
    option(parser, "--tls-certificate FILE", "the certificate to show the server, in PEM form", "")
    option(parser, "--tls-key FILE", "the private key of --tls-certificate", "")


def tls_files(options: argparse.Namespace) -> "TlsFiles | None":
    """Returns the files that the options name; None without TLS. Raises SetupError."""
    from neuronpipe.platform.tls import TlsFiles

    files = TlsFiles(options.tls_certificate, options.tls_key, options.tls_ca)
    if files.certificate and not files.ca:
        raise SetupError("--tls-certificate: needs --tls-ca, the authorities of the server's certificate")
    return files if files.ca else None


def add_key(parser: argparse.ArgumentParser) -> None:
    """Adds --api-key-file. A key itself is never an option: other users of a machine see its command lines."""
    option(parser, "--api-key-file FILE", "file of the API key or token (default: variable NEURONPIPE_API_KEY)", Path)


def use_key_of(path: Path) -> None:
    """Makes the command, and the processes that it starts, call with the key of a file. Raises SetupError."""
    from neuronpipe.rpc.client import KEY_VARIABLE

    try:
        os.environ[KEY_VARIABLE] = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "holds no key"
        raise SetupError(f"--api-key-file {path}: {problem}") from error


def complete_models(parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Returns the names of a gateway's models, if the command line has its --target and the gateway answers."""
    from neuronpipe.client import Client

    try:
        if parsed_args.api_key_file:
            use_key_of(parsed_args.api_key_file)
        tls = tls_files(parsed_args)
        with Client(parsed_args.target, timeout_s=_COMPLETION_LIMIT_S, retries=False, tls=tls) as client:
            return sorted({model.name for model in client.list_models()})
    except (AttributeError, TypeError, NeuronpipeError):  # no --target yet, or no gateway there
        return []


def add_address(parser: argparse.ArgumentParser, meaning: str) -> None:
    option(
        parser,
        "--target HOST:PORT",
        f"{meaning} (default: the variable {_TARGET_VARIABLE}, or else {_DEFAULT_TARGET})",
        parse_target,
        default=os.environ.get(_TARGET_VARIABLE) or _DEFAULT_TARGET,
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds --target, --timeout-s, and the options of TLS and of the key."""
    add_address(parser, "the gateway")
    add_tls(parser)
    add_key(parser)
    option(parser, "--timeout-s S", "deadline in seconds, at most a day (default: 30)", parse_timeout_s, default=30.0)


def add_request(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Adds the options that read_requests reads."""
    model = option(parser, "--model M", "the model's name", required=is_required)
    completed_by(model, complete_models)
    option(parser, "--version V", "the model's version (default: the newest)", "")
    option(
        parser,
        "--task TASK",
        "the task of the input (default: the first of the model's that takes these flags)",
        choices=[task.replace("_", "-") for task in NEEDED],
    )
    option(
        parser,
        "--json INPUT",
        """instead of other flags: a TaskInput, such as '{"sentence-embedding": {"text": "…"}}', or @FILE, or -""",
    )
    add_input_flags(parser)


def connected(options: argparse.Namespace) -> "Client":
    """Makes the client of the gateway that add_target's options name. Raises SetupError."""
    from neuronpipe.client import Client

    return Client(options.target, timeout_s=options.timeout_s, tls=tls_files(options))


def read_requests(options: argparse.Namespace, client: "Client") -> "list[InferRequest]":
    """Returns the requests that add_request's options describe, all of one task.

    Asks the gateway for the model's tasks if the options do not name the task. Raises SetupError, and the errors of
    this call.
    """
    from neuronpipe.api.v1.inference_pb2 import InferRequest
    from neuronpipe.cli.task_json import read_task_input

    fields = read_fields(options)
    if options.json is not None:
        if fields or options.task:
            raise SetupError(f"--json: not with {flag(next(iter(fields), 'task'))}; the JSON has all of the input")
        text = read_text(options.json, "--json")
        try:
            inputs = [read_task_input(text)]
        except SetupError as error:
            raise SetupError(f"--json: is not a valid TaskInput: {error}") from error
    elif not fields:
        raise SetupError("no input is given: add --text or another field of the task, or --json")
    else:
        if options.task:
            tasks, whose = [options.task.replace("-", "_")], f"--task {options.task}"
        else:
            tasks, whose = tasks_of(client.get_model(options.model, options.version)), f"model {options.model!r}"
        inputs = make_inputs(choose_task(tasks, fields, whose), fields)
    return [InferRequest(model=options.model, version=options.version, input=input) for input in inputs]


def tasks_of(model: "Model") -> list[str]:
    """Returns a model's tasks, first the task that it was compiled for."""
    return list(dict.fromkeys([model.task, *model.tasks]))


def parse_target(text: str) -> str:
    """Reads --target: HOST:PORT, with or without a gRPC scheme, or unix:PATH."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    try:
        check_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_timeout_s(text: str) -> float:
    timeout_s = seconds(text)
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0 and at most {_MAX_TIMEOUT_S:,}")
    return timeout_s


def flag(field: str) -> str:
    name = FIELDS[field].flag if field in FIELDS else ""
    return "--" + (name or field).replace("_", "-")


def sample_json(task: str) -> str:
    """Returns a sample input of a task as JSON, to change and send."""
    return json.dumps({task: SAMPLES[task]}, indent=2, ensure_ascii=False)


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    inputs = parser.add_argument_group(
        "input", "A TEXT may be @FILE, or - for standard input: the whole file, or where several are taken its lines."
    )
    options = parser.add_argument_group("options of tasks")

    for name, field in FIELDS.items():
        settings = dict(_SETTINGS[field.kind])
        if field.words:
            settings["choices"] = field.words.split()
        if name in _REPEATED:
            settings["action"] = "append"
        added = (inputs if field.is_input else options).add_argument(flag(name), dest=name, help=field.text, **settings)
        if field.kind in ("text", "texts"):
            completed_by(added, complete_at_file)


def read_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the given fields, with the content of files; `text` and `image` are lists. Raises SetupError."""
    set_options = {field: value for field in FIELDS if (value := getattr(options, field)) is not None}
    fields = {field: _read(field, value) for field, value in set_options.items()}
    if has_inputs_in_texts(options):
        fields["text"] = [*fields.get("text", ()), *fields.pop("texts")]
    return fields


def has_inputs_in_texts(options: argparse.Namespace) -> bool:
    """Returns whether --texts are inputs, rather than the texts of one input."""
    return options.texts is not None and options.query is None and options.source is None


def make_inputs(task: str, fields: Mapping[str, Any]) -> "list[TaskInput]":
    from neuronpipe.api.v1.tasks_pb2 import TaskInput

    kinds: Mapping[str, Any] = _kind_of(task).fields_by_name
    shared = {name: value for name, value in fields.items() if name not in _REPEATED}
    if "aggregation" in kinds:
        shared.setdefault("aggregation", "simple")  # as in the clients' method
    for name in (name for name in shared if FIELDS[name].kind == "words"):
        prefix = kinds[name].enum_type.values[0].name.removesuffix("UNSPECIFIED")
        shared[name] = prefix + shared[name].upper()
    repeated = next((name for name in _REPEATED if name in fields), None)
    own_fields = [{repeated: value} for value in fields[repeated]] if repeated else [{}]
    # protobuf makes messages of dictionaries.
    return [TaskInput(**cast(Any, {task: {**shared, **input_fields}})) for input_fields in own_fields]


def choose_task(tasks: Sequence[str], fields: Mapping[str, Any], whose: str) -> str:
    """Returns the first task that takes the fields. Raises SetupError, with the fields that tasks of `whose` take."""
    known_tasks = [task for task in tasks if task in NEEDED]  # a newer gateway may have other tasks
    for task in known_tasks:
        if {*NEEDED[task]} <= {*fields} <= {*_kind_of(task).fields_by_name}:
            return task
    flags = ", ".join(map(flag, fields)) or "no input"
    takes = "; ".join(map(_usage, known_tasks)) or f"its tasks are {', '.join(tasks)}"
    raise SetupError(f"{whose} has no task for {flags}; {takes}")


def _kind_of(task: str) -> Any:
    from neuronpipe.api.v1.tasks_pb2 import TaskInput

    return getattr(TaskInput(), task).DESCRIPTOR


def _usage(task: str) -> str:
    needed = NEEDED[task]
    fields: Mapping[str, Any] = _kind_of(task).fields_by_name
    others = [name for name in fields if name in FIELDS and name not in needed]
    # With --texts, a task of single texts gets several inputs.
    options = [f"[{flag(name)}]" for name in others if name != "texts" or "text" not in fields]
    return f"{task.replace('_', '-')} takes {' '.join([*map(flag, needed), *options])}"


def _read(field: str, value: Any) -> Any:
    name = flag(field)
    kind = FIELDS[field].kind
    if kind == "image":
        return [read_bytes(file, name) for file in value]
    if kind == "texts":
        return read_lines(value, name)
    if field in _REPEATED:
        return [read_text(text, name) for text in value]
    return read_text(value, name) if kind == "text" else value


def _parse_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= _MAX_UINT32):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {_MAX_UINT32}")
    return int(text)


# Kind of a field → arguments of its flag.
_SETTINGS: Mapping[FieldKind, Mapping[str, Any]] = {
    "text": {"metavar": "TEXT"},
    "texts": {"action": "extend", "nargs": "+", "metavar": "TEXT"},
    "image": {"metavar": "FILE"},
    "number": {"type": _parse_number, "metavar": "N"},
    "numbers": {"type": _parse_number, "action": "extend", "nargs": "+", "metavar": "ID"},
    "real": {"type": float, "metavar": "X"},
    "switch": {"action": "store_const", "const": True},
    "words": {},
}
