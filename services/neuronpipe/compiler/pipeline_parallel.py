"""Cuts a model between layers into parts, each for a core of its own (--pipeline-cores).

A part runs the model's own code. Stand-ins replace the layers of other parts: the first stand-in returns the output of
the part before, and the stand-in behind the part's last layer ends the run. So each part has the masks and positions
that the model makes, and its trace contains only what the part needs.
"""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from neuronpipe.compiler.architectures import has_decoder
from neuronpipe.compiler.modules import Positional, SampleBatch, SourceModule, pretrained_model
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.parts import HIDDEN

# The largest difference between the parts and the model, as a share of the largest output.
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """`cores`: the number of parts. `balance`: the quantity that is equal in all parts, see BALANCES."""

    cores: int = 1
    balance: str = "time"


ONE_CORE = PipelineOptions()


def cut_module(source: SourceModule, batch: SampleBatch, options: PipelineOptions) -> "PipelinedModel | None":
    """Cuts a model into the requested parts; None for one part. Raises SetupError if the model cannot be cut."""
    if options.cores == 1:
        return None
    if has_decoder(pretrained_model(source.module)):
        problem = f"{source.architecture} has an encoder that every layer of its decoder reads"
        raise SetupError(f"--pipeline-cores: {problem}; compile it for one core")
    return PipelinedModel(source, {name: torch.from_numpy(batch[name]) for name in source.inputs}).cut(options)


class PipelinedModel:
    """A model that is cut into parts. `firsts`: the first layer of each part."""

    def __init__(self, source: SourceModule, example: Mapping[str, torch.Tensor], firsts: Sequence[int] = (0,)) -> None:
        """Runs the model on a batch. Raises SetupError if no layers of the model run one after the other."""
        self.source = source
        self.firsts = tuple(firsts)
        self._layers = next(
            (layers for layers in _module_lists(source.module) if _run_in_order(source, layers, example)), None
        )
        if self._layers is None:
            problem = f"{source.architecture} has no two layers of its own that run one after the other"
            raise SetupError(f"--pipeline-cores: {problem}; compile it for one core")
        self._own = list(self._layers)
        self._example = dict(example)
        self._read_run()

    @property
    def layers(self) -> int:
        return len(self._own)

    def cut(self, options: PipelineOptions) -> "PipelinedModel":
        """Cuts the model into parts of about the same time, or memory. Raises SetupError if this is impossible."""
        if options.cores > self.layers:
            problem = f"{self.source.architecture} has {self.layers} layers, and a part needs one"
            raise SetupError(f"--pipeline-cores {options.cores}: {problem}")
        costs = [_weights(layer, options.balance) for layer in self._own]
        costs[0] += sum(_weights(module, options.balance) for module in self._before)
        costs[-1] += sum(_weights(module, options.balance) for module in self._after)
        firsts = _balanced(costs, options.cores)
        cut = PipelinedModel(self.source, self._example, firsts)
        cut._check()
        return cut

    @contextlib.contextmanager
    def part(
        self, number: int, *, has_fixed_shapes: bool = False
    ) -> Iterator[tuple[SourceModule, dict[str, torch.Tensor]]]:
        """Gives a part, and an example of its inputs. The model itself must not be used until the block ends.

        `has_fixed_shapes`: the part is for the shapes of the example, so that no input is needed for its shape.
        """
        first, last = self.firsts[number], [*self.firsts, self.layers][number + 1]
        start = _Start(self._own[0]) if first else None
        stand_ins = [_HandedOn(layer) for layer in self._own]
        ends = [_End(self._own[last])] if last < self.layers else []
        part_modules = [*([start] if start else []), *stand_ins[1:first], *self._own[first:last], *ends]
        part_modules += [torch.nn.Identity() for _ in self._own[len(part_modules) :]]
        outputs = (HIDDEN,) if ends else self.source.outputs
        example = self._example | ({HIDDEN: self._hidden[first]} if start else {})
        with contextlib.ExitStack() as stack, torch.no_grad():
            stack.callback(self._put, self._own)
            self._put(part_modules)
            part = _Part(self.source.module, start, {})
            inside = {id(module) for layer in self._own[first:last] for module in layer.modules()}
            _drop_unread(part, example, inside, stack)
            needed = _needed(part, example, outputs, "aten::size" if has_fixed_shapes else "")
            absent = {name: tensor for name, tensor in self._example.items() if name not in needed}
            part = _Part(self.source.module, start, absent).eval()
            part_source = dataclasses.replace(self.source, module=part, inputs=tuple(needed), outputs=outputs)
            yield part_source, {name: example[name] for name in needed}

    def describe(self) -> str:
        ranges = [f"{first}-{following - 1}" for first, following in itertools.pairwise([*self.firsts, self.layers])]
        return f"      {len(self.firsts)} parts: layers {', '.join(ranges)}"

    def run(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Computes the outputs of each batch, part after part."""
        values = [dict(batch) for batch in batches]
        for number in range(len(self.firsts)):
            with self.part(number) as (part, _):
                for batch_values in values:
                    batch_values |= part.module(**{name: batch_values[name] for name in part.inputs})
        return [{name: batch_values[name] for name in self.source.outputs} for batch_values in values]

    def _check(self) -> None:
        with torch.no_grad():
            expected = self.source.module(**self._example)
            refusal = SetupError(
                f"--pipeline-cores: parts of {self.source.architecture} do not compute what it does, as more than a "
                "layer's vectors passes from one layer to the next; compile it for one core"
            )
            try:
                (computed,) = self.run([self._example])
            except MemoryError:
                raise
            except Exception as error:  # the model's code may raise any exception
                raise refusal from error
        if not all(_is_close(computed[name], tensor) for name, tensor in expected.items()):
            raise refusal

    def _put(self, layers: Sequence[torch.nn.Module]) -> None:
        for number, layer in enumerate(layers):
            self._layers[number] = layer  # type: ignore[index]

    def _read_run(self) -> None:
        """Records the input of each layer, and the modules with weights that run before and behind the layers."""
        self._hidden: list[torch.Tensor] = []
        self._before: list[torch.nn.Module] = []
        self._after: list[torch.nn.Module] = []
        inside = {id(module) for layer in self._own for module in layer.modules()}

        def enter(module: Any, args: Any, kwargs: Any) -> None:
            if id(module) not in inside:
                (self._after if self._hidden else self._before).append(module)
            elif any(module is layer for layer in self._own):
                self._hidden.append(_first_of(args, kwargs).clone())

        watched = [*self._own, *(module for module in _with_weights(self.source.module) if id(module) not in inside)]
        with contextlib.ExitStack() as stack, torch.no_grad():
            for module in watched:
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            self.source.module(**self._example)


class _Part(torch.nn.Module):
    """Takes the inputs of a part by name. `absent`: inputs of the model that do not matter to the part."""

    def __init__(self, module: torch.nn.Module, start: "_Start | None", absent: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.module = module
        self._start, self._absent = (start,), dict(absent)

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if start := self._start[0]:
            start.hidden = (inputs.pop(HIDDEN),)
        try:
            outputs: dict[str, torch.Tensor] = self.module(**inputs, **self._absent)
        except _Ended as ended:
            return {HIDDEN: ended.hidden}
        return outputs


class _Ended(Exception):
    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _HandedOn(torch.nn.Module):
    """Replaces a layer without its weights and returns its input. Models read attributes of the layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self._layer = (layer,)  # not a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._like(_first_of(args, kwargs))

    def _like(self, hidden: torch.Tensor) -> Any:
        return (hidden,) if getattr(self._layer[0], _GIVES_TUPLE, False) else hidden


class _Start(_HandedOn):
    """Returns the output of the part before."""

    hidden: tuple[torch.Tensor, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._like(self.hidden[0])


class _End(_HandedOn):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Ended(_first_of(args, kwargs))


class _Unread(torch.nn.Module):
    """Replaces weights that a part does not need. Its output must not matter, so the output is NaN."""

    def __init__(self, width: int | None) -> None:
        super().__init__()
        self._width = width

    def forward(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shape = value.shape if self._width is None else (*value.shape, self._width)
        return torch.full(shape, torch.nan)


# The attribute of layers that return a tuple.
_GIVES_TUPLE = "_neuronpipe_gives_tuple"


def _module_lists(module: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """Returns the lists of modules, the list with the most weights first."""
    lists = [child for child in module.modules() if isinstance(child, torch.nn.ModuleList) and len(child) > 1]
    return sorted(lists, key=lambda child: -_weights(child, "memory"))


def _run_in_order(source: SourceModule, layers: torch.nn.ModuleList, example: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether the layers run in order, each of them once. Marks the layers that return tuples."""
    calls: list[int] = []

    def note(number: int, layer: torch.nn.Module, args: Any, output: Any) -> None:
        calls.append(number)
        object.__setattr__(layer, _GIVES_TUPLE, isinstance(output, tuple))

    with contextlib.ExitStack() as stack, torch.no_grad():
        for number, layer in enumerate(layers):
            stack.callback(layer.register_forward_hook(partial(note, number)).remove)
        source.module(**example)
    return calls == list(range(len(layers)))


def _with_weights(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [child for child in module.modules() if next(child.parameters(recurse=False), None) is not None]


def _drop_unread(
    part: _Part, example: Mapping[str, torch.Tensor], inside: set[int], stack: contextlib.ExitStack
) -> None:
    """Removes weights without which the part computes the same, such as embeddings. `stack` puts them back."""
    expected = part(**example)
    owners = [(parent, name, child) for parent in part.modules() for name, child in parent.named_children()]
    for parent, name, child in owners:
        if id(child) in inside or next(child.children(), None) or next(child.parameters(), None) is None:
            continue
        setattr(parent, name, _Unread(child.embedding_dim if isinstance(child, torch.nn.Embedding) else None))
        try:
            computed = part(**example)
            is_same = all(torch.equal(computed[key], tensor) for key, tensor in expected.items())
        except Exception:  # the model's code may fail in any way without the module
            is_same = False
        if is_same:
            stack.callback(setattr, parent, name, child)
        else:
            setattr(parent, name, child)


def _needed(part: _Part, example: Mapping[str, torch.Tensor], outputs: Sequence[str], but_for: str) -> list[str]:
    """Finds the inputs on which the outputs depend, in order. `but_for`: an operation that does not count."""
    positional = Positional(part, tuple(example), outputs).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Python values that the tracer treats as constant
        traced = torch.jit.trace(positional, tuple(example.values()), check_trace=False, strict=False)
    graph = traced.inlined_graph
    torch._C._jit_pass_dce(graph)
    _, *values = graph.inputs()
    used = [any(use.user.kind() != but_for for use in value.uses()) for value in values]
    return [name for name, is_used in zip(example, used, strict=True) if is_used]


def _weights(module: torch.nn.Module, balance: str) -> int:
    """Counts the weights of a module as its cost; for time, only the weights that it multiplies."""
    counts = balance != "time" or not isinstance(module, torch.nn.Embedding)
    own_weights = counts * sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return own_weights + sum(_weights(child, balance) for child in module.children())


def _balanced(costs: Sequence[int], parts: int) -> tuple[int, ...]:
    """Returns the first item of each of `parts` groups of neighbours, with the smallest possible largest sum.

    The other sums are about equal.
    """
    sums = [0, *itertools.accumulate(costs)]

    @cache
    def best(first: int, parts_left: int) -> tuple[int, int, tuple[int, ...]]:
        if parts_left == 1:
            part_cost = sums[-1] - sums[first]
            return part_cost, part_cost**2, (first,)
        candidates = []
        for cut in range(first + 1, len(costs) - parts_left + 2):
            part_cost, (largest, squares, firsts) = sums[cut] - sums[first], best(cut, parts_left - 1)
            candidates.append((max(part_cost, largest), part_cost**2 + squares, (first, *firsts)))
        return min(candidates)

    return best(0, parts)[2]


def _first_of(args: Any, kwargs: Any) -> torch.Tensor:
    """Returns the input that a layer gets from the layer before it."""
    return args[0] if args else kwargs["hidden_states"]


def _is_close(computed: torch.Tensor, expected: torch.Tensor) -> bool:
    limit = _TOLERANCE * max(1.0, float(expected.abs().max()))
    return bool(torch.allclose(computed, expected, rtol=0, atol=limit))
