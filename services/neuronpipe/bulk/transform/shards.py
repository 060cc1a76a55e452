"""Runs shards: reads rows, writes a file of results, then the shard's line in the manifest.

So every listed file is complete, on any machine that wrote it, and no file is ever appended to.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.transform.files import Folder, mark_of, naming, open_folder, open_input, unwritable, write_file
from neuronpipe.bulk.transform.formats import InputRow, Place, find_format
from neuronpipe.bulk.transform.request import Engine, InputAnswer, InputOutcome
from neuronpipe.bulk.transform.rows import RowTask, is_failed
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, SetupError
from neuronpipe.gateway.many import answer_in_order

RUN_FILE = "_run.json"
MANIFEST_FILE = "_manifest.jsonl"
_SHARDS = "_shards"


@dataclass(frozen=True, slots=True)
class DoneShard:
    """A shard whose results are complete. `first_row`: in its file, from 0 on. Failed rows have no tokens."""

    number: int
    file: str
    size_bytes: int
    input: str
    first_row: int
    rows: int
    errors: int
    tokens: int
    truncated_tokens: int
    padded_tokens: int


class ShardManifest:
    """The list of a run's shards, in its output folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def begin(self, fingerprint: str, description: dict[str, object]) -> None:
        """Begins a run, or continues it. Raises SetupError if the folder holds another run; the message names the
        differences.
        """
        new = {"fingerprint": fingerprint, **description}
        if (content := self._folder.read(RUN_FILE)) is None:
            write_file(self._folder, RUN_FILE, (json.dumps(new, indent=2) + "\n").encode())
            return
        try:
            old = dict(json.loads(content))
        except (ValueError, TypeError) as error:
            raise SetupError(f"its {RUN_FILE} is damaged; choose another folder") from error
        if old.get("fingerprint") != fingerprint:
            changed = [name for name in new if name != "fingerprint" and new[name] != old.get(name)]
            raise SetupError(f"holds a run that differs in {', '.join(changed) or 'its input'}; choose another folder")

    def add(self, shard: DoneShard) -> None:
        """Lists a shard whose file of results exists. Raises SetupError."""
        write_file(self._folder, f"{_SHARDS}/{shard.number:05d}.json", _line(shard))

    def done(self) -> list[DoneShard]:
        """Returns the listed shards whose results exist, in order. Raises SetupError."""
        names = [name for name in self._folder.names(_SHARDS) if name.endswith(".json")]
        listed = [shard for name in names if (shard := self._listed(name))]
        sizes = self._folder.sizes([shard.file for shard in listed])
        complete = [shard for shard in listed if sizes.get(shard.file) == shard.size_bytes]
        return sorted(complete, key=lambda shard: shard.number)

    def _listed(self, name: str) -> DoneShard | None:
        """Reads the shard that a file records; None for a damaged file. That shard is then computed again."""
        try:
            return DoneShard(**json.loads(self._folder.read(name) or b""))
        except (ValueError, TypeError):
            return None

    def complete(self, shards: Sequence[DoneShard]) -> None:
        """Writes the list of all shards into one file. Raises SetupError."""
        write_file(self._folder, MANIFEST_FILE, b"".join(map(_line, shards)))


def _line(shard: DoneShard) -> bytes:
    return json.dumps(asdict(shard)).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Shard:
    """Neighbouring rows of one file, which become one file of results. `mark`: the file's mark before the scan."""

    number: int
    file: str
    mark: str
    place: Place
    rows: int
    columns: Sequence[str]

    def name(self, ending: str) -> str:
        return f"part-{self.number:05d}{ending}"


# Maximum number of failed rows that a report names.
NAMED_ERRORS = 5


@dataclass(frozen=True, slots=True)
class ShardWork:
    folder: str
    input_format: str
    output_format: str
    task: RowTask


@dataclass(frozen=True, slots=True)
class RowError:
    """A row that failed. `row`: in its file, from 1 on."""

    file: str
    row: int
    message: str


@dataclass(frozen=True, slots=True)
class RowProgress:
    rows: int
    errors: int
    named_errors: Sequence[RowError] = ()


@dataclass(frozen=True, slots=True)
class _Window:
    """Rows that are handed to the engine at once, each with its inputs, or its error."""

    shard: Shard
    first_row: int
    rows: Sequence[InputRow]
    inputs: Sequence[Sequence[TaskInput] | InvalidInput]
    is_last: bool


_Answered = tuple[_Window, Sequence[Sequence[InputOutcome]]]


async def run_shards(
    shards: Iterable[Shard], work: ShardWork, engine: Engine, note: Callable[[RowProgress], None]
) -> AsyncIterator[DoneShard]:
    """Runs shards in order, and yields each when it is complete. `note`: called after each window. Raises SetupError,
    errors of the engine that end a run, and the errors of `note`.
    """

    async def answer(window: _Window) -> _Answered:
        valid = [row_inputs for row_inputs in window.inputs if not isinstance(row_inputs, InvalidInput)]
        inputs = [input for row_inputs in valid for input in row_inputs]
        outcomes = iter(await engine.infer(inputs) if inputs else ())
        return window, [
            [row_inputs] if isinstance(row_inputs, InvalidInput) else [next(outcomes) for _ in row_inputs]
            for row_inputs in window.inputs
        ]

    results: _Results | None = None
    windows = _WindowReader(shards, work, engine.window_rows)
    try:
        async with contextlib.aclosing(answer_in_order(windows, answer, engine.windows_in_flight)) as answered:
            async for window, outcomes in answered:
                results = results or _Results(window.shard, work)
                note(await asyncio.to_thread(results.write, window, outcomes))
                if window.is_last:
                    yield await asyncio.to_thread(results.complete)
                    results = None
    finally:
        await windows.close()
        if results:
            results.discard()


class _Results:
    """The file of results of a shard that is being computed."""

    def __init__(self, shard: Shard, work: ShardWork) -> None:
        format = find_format(work.output_format)
        self._shard = shard
        self._task = work.task
        self._name = shard.name(format.ending)
        self._folder = open_folder(work.folder)
        self._path = f"{work.folder}/{self._name}"
        self._new = self._folder.create(self._name)
        with unwritable(self._path):
            self._writer = format.open_writer(self._new.file, work.task.columns)
        self._errors = self._tokens = self._truncated = self._padded = 0

    def write(self, window: _Window, outcomes: Sequence[Sequence[InputOutcome]]) -> RowProgress:
        """Adds a window's rows. Raises SetupError."""
        records = [self._task.record(row, answers) for row, answers in zip(window.rows, outcomes, strict=True)]
        with unwritable(self._path):
            self._writer.write(records)
        answers = [outcome for row_outcomes in outcomes for outcome in row_outcomes if isinstance(outcome, InputAnswer)]
        errors = [
            RowError(self._shard.file, window.first_row + place + 1, _message(row_outcomes))
            for place, row_outcomes in enumerate(outcomes)
            if is_failed(row_outcomes)
        ]
        self._errors += len(errors)
        self._tokens += sum(answer.tokens for answer in answers)
        self._padded += sum(answer.padded_tokens for answer in answers)
        self._truncated += sum(answer.truncated_tokens for answer in answers)
        return RowProgress(len(window.rows), len(errors), errors[:NAMED_ERRORS])

    def discard(self) -> None:
        with contextlib.suppress(Exception):  # any error of a library on a full disk
            self._writer.close()
        self._new.discard()

    def complete(self) -> DoneShard:
        """Gives the file its name, and lists it. Raises SetupError."""
        with unwritable(self._path):
            self._writer.close()
            size_bytes = self._new.file.tell()
        self._new.complete()
        shard = self._shard
        done = DoneShard(
            number=shard.number,
            file=self._name,
            size_bytes=size_bytes,
            input=shard.file,
            first_row=shard.place.row,
            rows=shard.rows,
            errors=self._errors,
            tokens=self._tokens,
            truncated_tokens=self._truncated,
            padded_tokens=self._padded,
        )
        ShardManifest(self._folder).add(done)
        return done


def _message(outcomes: Sequence[InputOutcome]) -> str:
    return next(outcome.message for outcome in outcomes if isinstance(outcome, NeuronpipeError))


class _WindowReader:
    """The rows of the shards, which a thread reads."""

    def __init__(self, shards: Iterable[Shard], work: ShardWork, window_rows: int) -> None:
        self._thread = ThreadPoolExecutor(1, "rows")
        self._windows = _read_windows(shards, work, window_rows)

    def __aiter__(self) -> AsyncIterator[_Window]:
        return self

    async def __anext__(self) -> _Window:
        window = await asyncio.get_running_loop().run_in_executor(self._thread, next, self._windows, None)
        if window is None:
            raise StopAsyncIteration
        return window

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._windows.close)
        self._thread.shutdown()


def _read_windows(shards: Iterable[Shard], work: ShardWork, window_rows: int) -> Generator[_Window, None, None]:
    """Yields the rows of the shards. A file stays open for the shards that follow each other in it."""
    format = find_format(work.input_format)
    rows: Iterator[InputRow] = iter(())
    at: tuple[str, int] | None = None
    with contextlib.ExitStack() as opened:
        for shard in shards:
            with naming(shard.file):
                if at != (shard.file, shard.place.row):
                    opened.close()
                    file = opened.enter_context(contextlib.closing(open_input(shard.file)))
                    rows = format.read(file, shard.place, shard.columns)
                for first in range(0, shard.rows, window_rows):
                    count = min(window_rows, shard.rows - first)
                    window = list(itertools.islice(rows, count))
                    if len(window) < count:
                        raise SetupError("has changed since the run began: it has fewer rows")
                    is_last = first + window_rows >= shard.rows
                    if is_last and mark_of(shard.file) != shard.mark:
                        raise SetupError("has changed since the run began")
                    inputs = [_inputs(work.task, row) for row in window]
                    yield _Window(shard, shard.place.row + first, window, inputs, is_last)
            at = shard.file, shard.place.row + shard.rows


def _inputs(task: RowTask, row: InputRow) -> Sequence[TaskInput] | InvalidInput:
    try:
        return task.inputs(row)
    except InvalidInput as error:
        return error
