"""The description of a model that every service has, and the table of a service's models."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from operator import itemgetter
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError, create_model, model_validator

from neuronpipe.core.errors import InvalidInput, ModelNotFound, Unavailable, WrongTask
from neuronpipe.core.tensors import Arrays

EntryT = TypeVar("EntryT")
PydanticT = TypeVar("PydanticT", bound=BaseModel)
Resampling = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]

# Tasks that every model of texts answers by its tokenizer alone, in addition to the tasks of its graph.
TOKENIZER_TASKS = ("tokenization", "detokenization")

# The input of a model with adapters: at each token of a row, the number of its adapter, or 0 for the base alone.
ADAPTER = "adapter"

# Longer words of a request are not repeated in its error, which must fit into gRPC's trailers (8 KiB).
_MAX_WORD_LENGTH = 256


class Frozen(BaseModel):
    """A value that is read from a file. It never changes, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def problems_of(error: ValidationError) -> str:
    """Returns the first problems, each with its place."""
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, "))))
        for problem in error.errors()[:3]
    )


class OutputSpec(Frozen):
    """An output of a model. `axes`, without the batch axis: "tokens" for the sequence length, or a fixed size."""

    name: str
    axes: tuple[int | Literal["tokens"], ...]


class ImageSpec(Frozen):
    """Steps from an RGB image to the pixels that a model takes, uint8 [3, *size].

    The image is resized, then cropped, if these are set. Scaling and normalizing follow in the compiled model. Sizes
    are (height, width).
    """

    resize: tuple[int, int] | int | None = Field(
        None, description="the size, or the length of the shorter side; none: as it is"
    )
    resampling: Resampling = "bilinear"
    whitens: bool = Field(False, description="whether the colour that a file calls transparent becomes white")
    crop: tuple[int, int] | None = Field(
        None, description="the size of the middle that is kept; what is missing is black"
    )

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if min(self.size) < 1 or (isinstance(self.resize, int) and self.resize < 1):
            raise ValueError("sizes are whole numbers from 1 on")
        return self

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the pixels."""
        size = self.crop or self.resize
        if not isinstance(size, tuple):
            raise ValueError("images of different shapes would have different sizes")
        return size

    @property
    def tokens(self) -> int:
        """The number of tokens that an image counts as: its patches of 16 x 16 pixels, as in a vision transformer."""
        height, width = self.size
        return max(3, -(-height // 16) * -(-width // 16))  # 3 is the minimum of max_tokens


class AdapterSpec(Frozen):
    """An adapter, which requests name as BASE/NAME. `labels`, `score_function`: empty where the base's are meant."""

    name: str = Field(min_length=1)
    labels: tuple[str, ...] = ()
    score_function: str = ""


def with_fields(fields: Mapping[str, tuple[Any, Any]]) -> Callable[[type[PydanticT]], type[PydanticT]]:
    """Decorates a pydantic class: adds the fields that the class lacks, each a type and a default."""

    def decorate(kind: type[PydanticT]) -> type[PydanticT]:
        missing: Any = {name: field for name, field in fields.items() if name not in kind.model_fields}
        return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **missing)

    return decorate


class TaskFacts(Frozen):
    """Facts about a model that one task needs; encodings depend on `encoded`, and callers get `public_fields`."""

    encoded: ClassVar[tuple[str, ...]] = ()
    public_fields: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, model: "ModelSpec") -> Self:
        """Returns the model's facts of this class. Raises LookupError if the model has none."""
        for facts in model.facts.values():
            if isinstance(facts, cls):
                return facts
        raise LookupError(f"model {model.name!r} has no {cls.__name__}")


class ModelSpec(Frozen):
    """The description of a model for tasks, scheduler and gateway, a part of the bundle's manifest."""

    name: str = Field(min_length=1)
    version: int = Field(ge=1)
    task: str = Field(description="the model's own task, for which it was compiled")
    also_answers: tuple[str, ...] = Field((), description="other tasks that the same graph serves")
    architecture: str
    inputs: tuple[str, ...]
    outputs: tuple[OutputSpec, ...]
    max_tokens: int = Field(
        ge=3, description="maximum of tokens in a sequence, special tokens included; every image counts as this number"
    )
    largest_bucket: str = Field(
        "", description="the bucket that sets max_tokens, as in 8x128; empty where the model itself does"
    )
    vocabulary_size: int = Field(0, ge=0, description="token ids are below; 0 for a model of images alone")
    pad_token_id: int = Field(0, ge=0)
    labels: tuple[str, ...] = ()
    facts: Mapping[str, SerializeAsAny[TaskFacts]] = Field(
        {}, description="facts that each task needs of the model, by its name"
    )
    tokens: tuple[str, ...] = Field(
        (), exclude=True, repr=False, description="each token as text; a file of the bundle has them"
    )
    query_weights: tuple[float, ...] = Field(
        (),
        exclude=True,
        repr=False,
        description="weight of each token in queries that the model does not compute; a file of the bundle has them",
    )
    image: ImageSpec | None = Field(None, description="steps to a model's pixels, if it takes images")
    adapters: tuple[AdapterSpec, ...] = Field((), description="adapters in the graph, numbered from 1 on")
    needs_adapter: bool = Field(False, description="whether only adapters have a head, so that the base is not served")
    adapter: int = Field(0, exclude=True, description="the number of the adapter that this describes; 0 for the base")

    def adapted(self, number: int) -> "ModelSpec":
        """Describes the model with an adapter, by its number from 1 on, as a model named BASE/NAME."""
        adapter = self.adapters[number - 1]
        changes: dict[str, Any] = {"name": f"{self.name}/{adapter.name}", "adapter": number}
        if adapter.labels:
            facts = self.facts.get(self.task, TaskFacts())
            if adapter.score_function:
                facts = facts.model_copy(update={"score_function": adapter.score_function})
            outputs = tuple(
                OutputSpec(name=output.name, axes=(*output.axes[:-1], len(adapter.labels))) for output in self.outputs
            )
            changes |= {"labels": adapter.labels, "outputs": outputs, "facts": {self.task: facts}, "also_answers": ()}
        return self.model_copy(update=changes)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every task that the model answers, its own first."""
        return (self.task, *self.also_answers)

    def answers(self, task: str) -> bool:
        """Returns whether the model answers a task, by its graph or by its tokenizer."""
        return task == self.task or task in self.also_answers or (task in TOKENIZER_TASKS and self.takes_texts)

    def check_answers(self, task: str) -> None:
        """Raises WrongTask if the model does not answer the task."""
        if not self.answers(task):
            tasks = " and ".join(self.tasks).replace("_", "-")
            raise WrongTask(f"model {self.name!r} supports {tasks}, not {task.replace('_', '-')}")

    @property
    def is_static(self) -> bool:
        """Whether the model is a table of token vectors, which computes a text in less time than a queue takes."""
        return self.architecture == "StaticEmbeddingModel"

    @property
    def takes_texts(self) -> bool:
        """Whether the model has a tokenizer, with images or without."""
        return self.image is None or self.vocabulary_size > 0

    @property
    def image_tokens(self) -> int:
        """The tokens of an image in limits and usage, at most `max_tokens`; 0 if the model takes no images."""
        return min(self.image.tokens, self.max_tokens) if self.image else 0

    @property
    def image_length(self) -> int:
        """The length of an image in batches. If the model also takes texts, every text is shorter."""
        if self.image is None:
            return 0
        return max(self.image.tokens, self.max_tokens + 1) if self.takes_texts else self.image.tokens

    @property
    def token_limit(self) -> str:
        return f"{self.max_tokens}" + (f" (its largest bucket is {self.largest_bucket})" if self.largest_bucket else "")

    @property
    def public_facts(self) -> dict[str, Any]:
        """The facts that callers get from ModelService, by field of its message Model."""
        return {name: getattr(facts, name) for facts in self.facts.values() for name in facts.public_fields}

    def tokens_of(self, sequence: Arrays) -> int:
        """Returns the number of tokens of a sequence, or the number that an image counts as."""
        return len(sequence["input_ids"]) if "input_ids" in sequence else self.image_tokens


def encoding_traits(spec: ModelSpec) -> tuple[object, ...]:
    """Returns the traits that encodings of a model's inputs depend on, except its tokenizer and the input's task."""
    traits = sorted(
        (task, *(getattr(facts, name) for name in facts.encoded)) for task, facts in spec.facts.items() if facts.encoded
    )
    return spec.max_tokens, "token_type_ids" in spec.inputs, spec.image, *traits


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """The choice of a model's version for each request.

    - `aliases`: names of versions.
    - `shares`: versions with their relative shares of the requests that name no version.
    - `shadow`: the version that gets copies of requests, and the share of requests that is copied, from 0 to 1.
    """

    aliases: Mapping[str, int]
    shares: tuple[tuple[int, float], ...]
    shadow: tuple[int, float] | None = None

    @property
    def versions(self) -> frozenset[int]:
        """Every version that an alias or a share leads to, or that gets copies."""
        shadow = {self.shadow[0]} if self.shadow else set()
        return frozenset(self.aliases.values()) | {version for version, _ in self.shares} | shadow

    @property
    def compares(self) -> bool:
        """Whether several versions process requests that name no version."""
        return len(self.shares) > 1 or self.shadow is not None

    def pick(self, model: str, key: str) -> int:
        """Returns the version for a request that names none: the same for a key, while its share does not shrink."""
        place = _place(f"{model}\n{key}") * sum(share for _, share in self.shares)
        for version, share in self.shares:
            place -= share
            if place < 0:
                return version
        return self.shares[-1][0]

    def is_copied(self, model: str, request_id: str) -> bool:
        """Returns whether the shadow gets a copy of a request, which does not depend on the result of `pick`."""
        return self.shadow is not None and _place(f"{model}\nshadow\n{request_id}") < self.shadow[1]


NO_ROUTE = ModelRoute({}, ())


class ModelTable(Generic[EntryT]):
    """A service's models by name and version. Without a version, the model's route chooses, or the newest is taken."""

    def __init__(
        self,
        entries: Mapping[tuple[str, int], EntryT],
        routes: Mapping[str, ModelRoute] = MappingProxyType({}),
        other_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`routes`, `other_names`: by name. Other versions get no requests; names of served models come first."""
        self.other_names = other_names
        self._entries = dict(sorted(entries.items()))
        self.declared_routes = routes
        # Adapters of a model have its route.
        adapted = {
            name: routes[base] for name, _ in self._entries if (base := base_name(name)) != name and base in routes
        }
        self.routes = {name: _present(name, route, self._entries) for name, route in (adapted | dict(routes)).items()}
        self._default_versions = dict(self._entries.keys())  # sorted, so the last version of a name stays
        self._default_versions |= {
            name: max(route.shares, key=itemgetter(1))[0] for name, route in self.routes.items() if route.shares
        }
        # By name and version as requests write them: nearly all requests are found here.
        self._by_words = {(name, str(version)): entry for (name, version), entry in self._entries.items()}
        self._by_words |= {(name, ""): self._entries[name, version] for name, version in self._default_versions.items()}
        for name, route in self.routes.items():
            self._by_words |= {(name, alias): self._entries[name, version] for alias, version in route.aliases.items()}
        self._split = {name: route for name, route in self.routes.items() if len(route.shares) > 1}
        self._parts: dict[frozenset[str], ModelTable[EntryT]] = {}

    def __iter__(self) -> Iterator[EntryT]:
        return iter(self._entries.values())

    def find(self, name: str, version: str, key: str = "") -> EntryT:
        """Returns the entry for a name and a version: a number, an alias, or empty for the route's choice.

        `key`: requests with the same key get the same version; without a key, the version with the largest share.

        Raises ModelNotFound; InvalidInput for a version that is neither a whole number nor an alias; and Unavailable
        for an alias whose version is not loaded.
        """
        if key and not version and (route := self._split.get(name)):
            return self._entries[name, route.pick(name, key)]
        entry = self._by_words.get((name, version))
        if entry is not None:
            return entry
        if name in self.other_names and name not in self._default_versions:
            name = self.other_names[name]
            if name in self._default_versions:
                return self.find(name, version, key)
        head, _, adapter = name.rpartition("/")
        if (base := self.other_names.get(head)) in self._default_versions and name not in self._default_versions:
            return self.find(f"{base}/{adapter}", version, key)
        for field, word in ("model", name), ("version", version):
            if len(word) > _MAX_WORD_LENGTH:
                raise InvalidInput(field, f"{len(word)} characters, the limit is {_MAX_WORD_LENGTH}")
        if name not in self._default_versions:
            if related := [other for other in self._default_versions if base_name(other) == base_name(name)]:
                there_are = f"of {base_name(name)!r} there are: {', '.join(related)}"
                raise ModelNotFound(f"model {name!r} is not served; {there_are}")
            served = ", ".join(self._default_versions)
            raise ModelNotFound(f"model {name!r} is not served; the served models are: {served}")
        if name in self.declared_routes and version in self.declared_routes[name].aliases:
            aliased_version = self.declared_routes[name].aliases[version]
            raise Unavailable(f"model {name!r} version {aliased_version}, its {version}, is not loaded")
        if not (version.isascii() and version.isdigit()):
            aliases = ", ".join(self.routes[name].aliases) if name in self.routes else ""
            also = f" or an alias of the model, which has: {aliases}" if aliases else ""
            raise InvalidInput("version", f"{version!r} is not a whole number{also}")
        entry = self._entries.get((name, int(version)))
        if entry is None:
            versions = ", ".join(str(number) for known_name, number in self._entries if known_name == name)
            raise ModelNotFound(f"model {name!r} has no version {version}; it has: {versions}")
        return entry

    def at(self, key: tuple[str, int]) -> EntryT:
        """Returns the entry for a model's key, which a stage gets with an item. Raises ModelNotFound."""
        entry = self._entries.get(key)
        return self.find(key[0], str(key[1])) if entry is None else entry  # `find` names the missing model or version

    def find_shadow(self, name: str, version: int, request_id: str) -> EntryT | None:
        """Returns the entry that gets a copy of a request without a version, which `version` answered; mostly None."""
        route = self.routes.get(name)
        if route is None or route.shadow is None or route.shadow[0] == version or not route.is_copied(name, request_id):
            return None
        return self._entries[name, route.shadow[0]]

    def only(self, names: frozenset[str]) -> "ModelTable[EntryT]":
        """Returns the part of the table with these models and their adapters. Unknown names are ignored."""
        part = self._parts.get(names)
        if part is None:
            routes = {name: route for name, route in self.declared_routes.items() if name in names}
            entries = {
                key: entry for key, entry in self._entries.items() if key[0] in names or base_name(key[0]) in names
            }
            other_names = {other: name for other, name in self.other_names.items() if name in names}
            part = self._parts[names] = ModelTable(entries, routes, other_names)
        return part

    def is_default(self, name: str, version: int) -> bool:
        """Returns whether requests that name no version get this version, or most of them do."""
        return self._default_versions.get(name) == version


def base_name(name: str) -> str:
    """Returns the name of an adapter's base model, or of a model itself: only names of adapters have a slash."""
    return name.partition("/")[0]


def _place(text: str) -> float:
    """Returns a number from 0 to 1 that depends on the text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) / 2**64


def _present(name: str, route: ModelRoute, entries: Mapping[tuple[str, int], object]) -> ModelRoute:
    """Returns the part of a route whose versions are in `entries`."""
    return ModelRoute(
        {alias: version for alias, version in route.aliases.items() if (name, version) in entries},
        tuple((version, share) for version, share in route.shares if (name, version) in entries),
        route.shadow if route.shadow and (name, route.shadow[0]) in entries else None,
    )
