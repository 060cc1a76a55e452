"""The registry of a repository: the approved versions of its models, their aliases, and the routes of requests.

A `Registry` never changes. Each operation returns the next registry, with one more entry in its history.
"""

import getpass
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from neuronpipe.bundles.manifest import Accuracy
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.model import NO_ROUTE, Frozen, ModelRoute, problems_of

REGISTRY_FILE = "registry.json"
# The alias of the version that answers requests without a version, if the model has no route.
STABLE = "stable"
_ALIAS = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_MAX_HISTORY = 1000
# Limits the names of a model. The history repeats them for each change: a file of many long names cannot be read.
_MAX_NAMES = 100
_TargetName: TypeAlias = Annotated[str, Field(max_length=64)]

ApprovalState = Literal["pending", "approved", "rejected"]


def _check_alias(name: str) -> str:
    if not _ALIAS.fullmatch(name):
        raise ValueError(
            f"alias {name!r}: must begin with a letter and have lower-case letters, digits, dots, dashes and "
            "underscores, 64 at most"
        )
    return name


class Approval(Frozen):
    """The decision whether a version may be served, with its author and reason."""

    state: ApprovalState
    note: str = ""
    author: str = ""
    time: datetime


class RegisteredVersion(Frozen):
    """One version of a model. `digest`: the digest of its bundle, which no other bundle may replace."""

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    approval: Approval
    accuracy: Mapping[str, Accuracy] = Field({}, description="accuracy in the bundle's manifest, by back end")


class Shadow(Frozen, revalidate_instances="always"):
    """A version that gets copies of `percent` of the requests without a version; `target`: an alias or a number."""

    target: _TargetName
    percent: float = Field(gt=0, le=100, allow_inf_nan=False)


class Routing(Frozen):
    """The aliases of a model's versions, and the shares of the requests without a version.

    `route`: the share of each alias or version number. Shares are relative to each other. `is_unloaded`: no version is
    served, for any alias or share.
    """

    aliases: Annotated[
        Mapping[Annotated[str, AfterValidator(_check_alias)], Annotated[int, Field(ge=1)]], Field(max_length=_MAX_NAMES)
    ] = {}
    route: Annotated[
        Mapping[_TargetName, Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]], Field(max_length=_MAX_NAMES)
    ] = {}
    shadow: Shadow | None = None
    is_unloaded: bool = False

    @property
    def routing(self) -> "Routing":
        """The aliases and shares alone."""
        return Routing(**{name: getattr(self, name) for name in Routing.model_fields})


class RegisteredModel(Routing):
    """All versions of a model, and its routing."""

    versions: Mapping[int, RegisteredVersion] = {}

    @property
    def approved(self) -> frozenset[int]:
        return frozenset(number for number, version in self.versions.items() if version.approval.state == "approved")

    @property
    def anonymous(self) -> Self:
        versions = {
            number: version.model_copy(
                update={"approval": version.approval.model_copy(update={"author": "", "note": ""})}
            )
            for number, version in self.versions.items()
        }
        return self.model_copy(update={"versions": versions})

    @property
    def declared(self) -> ModelRoute:
        """The version that answers each request. An unloaded model has an empty route."""
        return NO_ROUTE if self.is_unloaded else self.routed(self.aliases)

    def routed(self, aliases: Mapping[str, int]) -> ModelRoute:
        """Returns the route with other aliases; without a route and `stable`, to the newest approved version."""
        shares: dict[int, float] = {}
        for target, share in self.route.items():
            version = _resolved(target, aliases)
            shares[version] = shares.get(version, 0.0) + share
        if not shares and (version := aliases.get(STABLE) or max(self.approved, default=0)):
            shares[version] = 1.0
        shadow = (_resolved(self.shadow.target, aliases), self.shadow.percent / 100) if self.shadow else None
        return ModelRoute(aliases, tuple(shares.items()), shadow)

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        targets = (*self.route, *((self.shadow.target,) if self.shadow else ()))
        resolved = ((target, _resolved(target, self.aliases)) for target in targets)
        for target, number in (*self.aliases.items(), *resolved):
            if number not in self.approved:
                state = self.versions[number].approval.state if number in self.versions else "not registered"
                raise ValueError(f"{target} is version {number}, which is {state}; only approved versions are served")
        return self


class Change(Routing):
    """An entry of the history: the action, and the routing of the model after it."""

    revision: int = Field(ge=1)
    time: datetime
    author: str
    model: str
    action: str


@dataclass(frozen=True, slots=True)
class Signed:
    """The author, reason and time of a change."""

    author: str = field(default_factory=lambda: _user())
    note: str = ""
    time: datetime = field(default_factory=lambda: datetime.now(UTC))


class Registry(Frozen):
    """The content of registry.json. Revision 0: there is no file, and every bundle of the repository is served."""

    schema_version: Literal[1] = 1
    revision: int = Field(0, ge=0)
    models: Mapping[str, RegisteredModel] = {}
    history: Sequence[Change] = ()

    @classmethod
    def parse(cls, written: bytes, path: Path | str) -> Self:
        """Parses the bytes of a registry file. Raises SetupError, which names the path and the fault."""
        try:
            registry = cls.model_validate_json(written)
        except ValidationError as error:
            raise SetupError(f"{path}: not a valid registry: {problems_of(error)}") from error
        if not registry.revision:
            raise SetupError(f"{path}: not a valid registry: revision: must be 1 or more")
        return registry

    @classmethod
    def of_bundles(cls, bundles: Sequence[Bundle], signed: Signed) -> Self:
        """Makes the first registry: it approves every version, and makes the newest version `stable`."""
        models: dict[str, RegisteredModel] = {}
        note = "was there before the registry"
        approval = Approval(state="approved", note=note, author=signed.author, time=signed.time)
        for bundle in sorted(bundles, key=lambda bundle: bundle.key):
            name, number = bundle.key
            registered_versions = models[name].versions if name in models else {}
            versions = {**registered_versions, number: _registered(bundle, approval)}
            models[name] = RegisteredModel(versions=versions, aliases={STABLE: number})
        history = []
        for name, model in models.items():
            action = f"registered version {', '.join(map(str, sorted(model.versions)))}"
            history.append(_change(1, name, action, signed, model.routing))
        return cls(revision=1, models=models, history=history)

    @property
    def desired(self) -> dict[ModelKey, RegisteredVersion]:
        """The versions that every process loads: all with an alias, a share of the requests, or copies of requests."""
        return {
            ModelKey(name, number): model.versions[number]
            for name, model in self.models.items()
            for number in sorted(model.declared.versions)
        }

    @property
    def routes(self) -> dict[str, ModelRoute]:
        return {name: model.declared for name, model in self.models.items() if model.declared.shares}

    def approval_of(self, key: ModelKey) -> ApprovalState:
        """Returns the approval of a version. An unregistered version is pending."""
        model = self.models.get(key.name)
        return model.versions[key.version].approval.state if model and key.version in model.versions else "pending"

    def approve(self, bundle: Bundle, signed: Signed) -> "Registry":
        """Approves a version. The first approved version of a model becomes `stable`. Raises SetupError."""
        name, number = bundle.key
        model = self.models.get(name, RegisteredModel())
        registered = model.versions.get(number)
        if registered and registered.digest != bundle.digest:
            raise SetupError(
                f"model {name!r} version {number}: registered with the digest {registered.digest[:16]}, the bundle has "
                f"{bundle.digest[:16]}; versions do not change: compile another one"
            )
        routing = model.routing
        if not model.approved:
            routing = routing.model_copy(update={"aliases": {**model.aliases, STABLE: number}})
        return self._decide(bundle, "approved", signed, None, routing)

    def register(self, bundle: Bundle, signed: Signed) -> "Registry":
        """Registers a version as pending, with a note. Raises SetupError if it is registered already."""
        name, number = bundle.key
        model = self.models.get(name, RegisteredModel())
        if number in model.versions:
            raise SetupError(f"model {name!r} version {number}: is registered already")
        return self._decide(bundle, "pending", signed, None, model.routing)

    def reject(self, bundle: Bundle, signed: Signed) -> "Registry":
        """Rejects a version, which loses its aliases, shares and copies. Raises SetupError if it is stable."""
        name, number = bundle.key
        model = self.models.get(name, RegisteredModel())
        stable = model.aliases.get(STABLE)
        if stable == number or (stable is None and model.declared.versions == {number}):
            raise SetupError(f"model {name!r}: version {number} is {STABLE}: make another version {STABLE} first")

        def stays(target: str) -> bool:
            return _resolved(target, model.aliases) != number

        routing = Routing(
            aliases={alias: version for alias, version in model.aliases.items() if version != number},
            route={target: share for target, share in model.route.items() if stays(target)},
            shadow=model.shadow if model.shadow and stays(model.shadow.target) else None,
            is_unloaded=model.is_unloaded,
        )
        return self._decide(bundle, "rejected", signed, model.versions.get(number), routing)

    def alias(self, name: str, alias: str, version: int | None, signed: Signed) -> "Registry":
        """Moves an alias to a version, or removes the alias for None. Raises SetupError."""
        model = self._model(name)
        aliases = {other: number for other, number in model.aliases.items() if other != alias}
        if version is None and alias not in model.aliases:
            raise SetupError(f"model {name!r} has no alias {alias!r}")
        if version is not None:
            aliases = {**model.aliases, alias: version}
        action = f"alias {alias}: {model.aliases.get(alias, 'none')} to {version or 'none'}"
        return self._changed(name, action, signed, aliases=aliases)

    def reroute(self, name: str, route: Mapping[str, float], signed: Signed) -> "Registry":
        """Sets the shares of the requests without a version; an empty route: only `stable`. Raises SetupError."""
        shares = " ".join(f"{target}={share:g}" for target, share in route.items()) or STABLE
        return self._changed(name, f"route {shares}", signed, route=route)

    def copy_to(self, name: str, target: str, percent: float, signed: Signed) -> "Registry":
        """Copies a share of the requests without a version to a target; an empty one ends it. Raises SetupError."""
        shadow = {"target": target, "percent": percent} if target else None
        return self._changed(name, f"shadow {target}={percent:g}" if target else "shadow none", signed, shadow=shadow)

    def load(self, name: str, signed: Signed) -> "Registry":
        """Declares an unloaded model again, with its aliases and shares. Raises SetupError."""
        if name in self.models and not self.models[name].approved:
            raise SetupError(f"model {name!r} has no approved version; `neuronpipe registry approve` approves one")
        return self._changed(name, "load", signed, is_unloaded=False)

    def unload(self, name: str, signed: Signed) -> "Registry":
        """Declares a model as unloaded: no version is served, and aliases and shares stay. Raises SetupError."""
        return self._changed(name, "unload", signed, is_unloaded=True)

    def set_routing(self, name: str, routing: Routing, action: str, signed: Signed) -> "Registry":
        return self._changed(name, action, signed, **_contents(routing))

    def roll_back(self, name: str, revision: int | None, signed: Signed) -> "Registry":
        """Restores a model's routing as of a revision; None: as before the last change. Raises SetupError."""
        model = self._model(name)
        if revision is not None and revision > self.revision:
            raise SetupError(f"revision {revision}: the registry has the revision {self.revision}")
        past = [change for change in self.history if change.model == name]
        if revision is None:
            differing = [change for change in past if change.routing != model.routing]
        else:
            differing = [change for change in past if change.revision <= revision]
        if not differing:
            wanted = "another routing than now" if revision is None else f"the revision {revision} or an earlier one"
            raise SetupError(f"the history of model {name!r} does not have {wanted}")
        target = differing[-1]
        return self.set_routing(name, target.routing, f"rolled back to revision {target.revision}", signed)

    def _model(self, name: str) -> RegisteredModel:
        if name not in self.models:
            raise SetupError(
                f"model {name!r} is not registered; registered are: {', '.join(self.models) or 'none'}; "
                "`neuronpipe registry approve` registers a version"
            )
        return self.models[name]

    def _decide(
        self, bundle: Bundle, state: ApprovalState, signed: Signed, entry: RegisteredVersion | None, routing: Routing
    ) -> "Registry":
        name, number = bundle.key
        approval = Approval(state=state, note=signed.note, author=signed.author, time=signed.time)
        decided = entry.model_copy(update={"approval": approval}) if entry else _registered(bundle, approval)
        versions = dict(sorted({**self.models.get(name, RegisteredModel()).versions, number: decided}.items()))
        return self._with(name, {"versions": versions, **_contents(routing)}, f"{state} version {number}", signed)

    def _changed(self, name: str, action: str, signed: Signed, **contents: Any) -> "Registry":
        return self._with(name, {**_contents(self._model(name)), **contents}, action, signed)

    def _with(self, name: str, contents: Mapping[str, Any], action: str, signed: Signed) -> "Registry":
        try:
            model = RegisteredModel.model_validate(contents)
        except ValidationError as error:
            raise SetupError(f"model {name!r}: {problems_of(error)}") from error
        revision, noted = self.revision + 1, f"{action}: {signed.note}" if signed.note else action
        history = [*self.history, _change(revision, name, noted, signed, model.routing)][-_MAX_HISTORY:]
        models = dict(sorted({**self.models, name: model}.items()))
        return Registry(revision=revision, models=models, history=history)


# An operation makes the next registry from the present registry.
Operation = Callable[[Registry], Registry]


def _change(revision: int, model: str, action: str, signed: Signed, routing: Routing) -> Change:
    who = {"time": signed.time, "author": signed.author}
    return Change(revision=revision, model=model, action=action, **who, **_contents(routing))


def _contents(model: BaseModel) -> dict[str, Any]:
    return {name: getattr(model, name) for name in type(model).model_fields}


def _registered(bundle: Bundle, approval: Approval) -> RegisteredVersion:
    accuracy = {artifact.backend: artifact.accuracy for artifact in bundle.manifest.artifacts if artifact.accuracy}
    return RegisteredVersion(digest=bundle.digest, approval=approval, accuracy=accuracy)


def _resolved(target: str, aliases: Mapping[str, int]) -> int:
    """Returns the version of a route's target. Raises ValueError if the alias is unknown."""
    if target.isascii() and target.isdigit():
        return int(target)
    if target not in aliases:
        raise ValueError(f"{target!r} is neither a version nor an alias of the model")
    return aliases[target]


def _user() -> str:
    """Returns the name of this process's user, or the user's number in a container without the name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
