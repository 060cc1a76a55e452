"""What a repository declares: which versions of its models are approved, what they are called, and who gets which.

A `Registry` never changes; each operation returns the next one, with one more entry in its history.
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
from neuronpipe.core.model import Frozen, ModelRoute, problems_of

REGISTRY_FILE = "registry.json"
# The alias that requests without a version get where the model has no route.
STABLE = "stable"
_ALIAS = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_MAX_HISTORY = 1000
# Of a model. The history has them once a change: many long ones make a file that is too large to be read.
_MAX_NAMES = 100
_Target: TypeAlias = Annotated[str, Field(max_length=64)]

ApprovalState = Literal["pending", "approved", "rejected"]


def _check_alias(name: str) -> str:
    if not _ALIAS.fullmatch(name):
        raise ValueError(
            f"alias {name!r}: must begin with a letter and have lower-case letters, digits, dots, dashes and "
            "underscores, 64 at most"
        )
    return name


class Approval(Frozen):
    """Whether a version may be served, who said so, and why."""

    state: ApprovalState
    note: str = ""
    author: str = ""
    time: datetime


class RegisteredVersion(Frozen):
    """One version of a model. `digest`: of its bundle, which no other bundle can take the place of."""

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    approval: Approval
    accuracy: Mapping[str, Accuracy] = Field({}, description="as the bundle measured it, by back end")


class Shadow(Frozen, revalidate_instances="always"):
    """A version that gets copies of requests, whose results nobody gets.

    `target`: an alias or a version number. `percent`: the share of the requests without a version that are copied.
    """

    target: _Target
    percent: float = Field(gt=0, le=100, allow_inf_nan=False)


class Routing(Frozen):
    """The names of a model's versions, and the shares of the requests that name none.

    `route`: aliases or version numbers, each with its share; shares are relative to each other. `is_unloaded`: no
    version is served, whatever names and shares say.
    """

    aliases: Annotated[
        Mapping[Annotated[str, AfterValidator(_check_alias)], Annotated[int, Field(ge=1)]], Field(max_length=_MAX_NAMES)
    ] = {}
    route: Annotated[
        Mapping[_Target, Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]], Field(max_length=_MAX_NAMES)
    ] = {}
    shadow: Shadow | None = None
    is_unloaded: bool = False

    @property
    def routing(self) -> "Routing":
        """Names and shares alone."""
        return Routing(**{name: getattr(self, name) for name in Routing.model_fields})


class RegisteredModel(Routing):
    """All versions of a model, and its routing."""

    versions: Mapping[int, RegisteredVersion] = {}

    @property
    def approved(self) -> frozenset[int]:
        """The versions that may be served."""
        return frozenset(number for number, one in self.versions.items() if one.approval.state == "approved")

    @property
    def anonymous(self) -> Self:
        """The model without who approved its versions, and why."""
        versions = {
            number: one.model_copy(update={"approval": one.approval.model_copy(update={"author": "", "note": ""})})
            for number, one in self.versions.items()
        }
        return self.model_copy(update={"versions": versions})

    @property
    def declared(self) -> ModelRoute:
        """Which version answers which request; nothing of a model that is unloaded."""
        return ModelRoute({}, ()) if self.is_unloaded else self.routed(self.aliases)

    def routed(self, aliases: Mapping[str, int]) -> ModelRoute:
        """As `declared`, with these aliases. A model without a route and without an alias `stable` has its newest
        approved version.
        """
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
        for target, number in (*self.aliases.items(), *((one, _resolved(one, self.aliases)) for one in targets)):
            if number not in self.approved:
                state = self.versions[number].approval.state if number in self.versions else "not registered"
                raise ValueError(f"{target} is version {number}, which is {state}; only approved versions are served")
        return self


class Change(Routing):
    """An entry of the history: what was done, and the routing of the model from then on."""

    revision: int = Field(ge=1)
    time: datetime
    author: str
    model: str
    action: str


@dataclass(frozen=True, slots=True)
class Signed:
    """Who makes a change, why, and when."""

    author: str = field(default_factory=lambda: _user())
    note: str = ""
    time: datetime = field(default_factory=lambda: datetime.now(UTC))


class Registry(Frozen):
    """The content of registry.json. Revision 0: there is none, and every bundle of the repository is served."""

    schema_version: Literal[1] = 1
    revision: int = Field(0, ge=0)
    models: Mapping[str, RegisteredModel] = {}
    history: Sequence[Change] = ()

    @classmethod
    def parse(cls, written: bytes, path: Path | str) -> Self:
        """The registry of a file's bytes. Raises SetupError, which names the path and what is wrong."""
        try:
            found = cls.model_validate_json(written)
        except ValidationError as error:
            raise SetupError(f"{path}: not a valid registry: {problems_of(error)}") from error
        if not found.revision:
            raise SetupError(f"{path}: not a valid registry: revision: must be 1 or more")
        return found

    @classmethod
    def of_bundles(cls, bundles: Sequence[Bundle], signed: Signed) -> Self:
        """The first registry of a repository, which says what was served without one: every version is approved, and
        the newest is `stable`.
        """
        models: dict[str, RegisteredModel] = {}
        approval = Approval(
            state="approved", note="was there before the registry", author=signed.author, time=signed.time
        )
        for bundle in sorted(bundles, key=lambda one: one.key):
            name, number = bundle.key
            known = models[name].versions if name in models else {}
            versions = {**known, number: _registered(bundle, approval)}
            models[name] = RegisteredModel(versions=versions, aliases={STABLE: number})
        history = [
            Change(
                revision=1,
                time=signed.time,
                author=signed.author,
                model=name,
                action=f"registered version {', '.join(map(str, sorted(model.versions)))}",
                aliases=model.aliases,
            )
            for name, model in models.items()
        ]
        return cls(revision=1, models=models, history=history)

    @property
    def desired(self) -> dict[ModelKey, RegisteredVersion]:
        """The versions that every process shall have: those with an alias, a share of requests, or copies of them."""
        return {
            ModelKey(name, number): model.versions[number]
            for name, model in self.models.items()
            for number in sorted(model.declared.versions)
        }

    @property
    def routes(self) -> dict[str, ModelRoute]:
        """Which version of which model answers which request."""
        return {name: model.declared for name, model in self.models.items() if model.declared.shares}

    def approval_of(self, key: ModelKey) -> ApprovalState:
        """Whether a version may be served; one that nobody has looked at is pending."""
        model = self.models.get(key.name)
        return model.versions[key.version].approval.state if model and key.version in model.versions else "pending"

    def approve(self, bundle: Bundle, signed: Signed) -> "Registry":
        """The version may be served. A model's first one becomes `stable`. Raises SetupError."""
        name, number = bundle.key
        model = self.models.get(name, RegisteredModel())
        known = model.versions.get(number)
        if known and known.digest != bundle.digest:
            raise SetupError(
                f"model {name!r} version {number}: registered with the digest {known.digest[:16]}, the bundle has "
                f"{bundle.digest[:16]}; versions do not change: compile another one"
            )
        routing = model.routing
        if not model.approved:
            routing = routing.model_copy(update={"aliases": {**model.aliases, STABLE: number}})
        return self._decide(name, number, "approved", signed, _registered(bundle, _pending(signed)), routing)

    def register(self, bundle: Bundle, signed: Signed) -> "Registry":
        """The version is pending, with a note. Raises SetupError for one that somebody has looked at."""
        name, number = bundle.key
        model = self.models.get(name, RegisteredModel())
        if number in model.versions:
            raise SetupError(f"model {name!r} version {number}: is registered already")
        return self._decide(name, number, "pending", signed, _registered(bundle, _pending(signed)), model.routing)

    def reject(self, bundle: Bundle, signed: Signed) -> "Registry":
        """The version must not be served; it loses aliases, shares and copies. Raises SetupError for the one that
        requests without a version get where there is no route.
        """
        name, number = bundle.key
        model = self.models.get(name, RegisteredModel())
        stable = model.aliases.get(STABLE)
        if stable == number or (stable is None and model.declared.versions == {number}):
            raise SetupError(f"model {name!r}: version {number} is {STABLE}: make another version {STABLE} first")

        def stays(target: str) -> bool:
            return _resolved(target, model.aliases) != number

        routing = Routing(
            aliases={alias: one for alias, one in model.aliases.items() if one != number},
            route={target: share for target, share in model.route.items() if stays(target)},
            shadow=model.shadow if model.shadow and stays(model.shadow.target) else None,
            is_unloaded=model.is_unloaded,
        )
        known = model.versions.get(number, _registered(bundle, _pending(signed)))
        return self._decide(name, number, "rejected", signed, known, routing)

    def alias(self, name: str, alias: str, version: int | None, signed: Signed) -> "Registry":
        """Calls a version by an alias, in place of the one that had it; None removes the alias. Raises SetupError."""
        model = self._model(name)
        aliases = {other: one for other, one in model.aliases.items() if other != alias}
        if version is None and alias not in model.aliases:
            raise SetupError(f"model {name!r} has no alias {alias!r}")
        if version is not None:
            aliases = {**model.aliases, alias: version}
        action = f"alias {alias}: {model.aliases.get(alias, 'none')} to {version or 'none'}"
        return self._with(name, {**_contents(model), "aliases": aliases}, action, signed)

    def reroute(self, name: str, route: Mapping[str, float], signed: Signed) -> "Registry":
        """Sets the shares of requests without a version; an empty route is all of them for `stable`.

        Raises SetupError.
        """
        shares = " ".join(f"{target}={share:g}" for target, share in route.items()) or STABLE
        return self._with(name, {**_contents(self._model(name)), "route": route}, f"route {shares}", signed)

    def copy_to(self, name: str, target: str, percent: float, signed: Signed) -> "Registry":
        """Has a share of the requests without a version copied to an alias or a version; an empty target ends it.

        Raises SetupError.
        """
        model = self._model(name)
        if not target:
            return self._with(name, {**_contents(model), "shadow": None}, "shadow none", signed)
        shadow = {"target": target, "percent": percent}
        return self._with(name, {**_contents(model), "shadow": shadow}, f"shadow {target}={percent:g}", signed)

    def load(self, name: str, signed: Signed) -> "Registry":
        """Has the model served again, by the names and shares that it has. Raises SetupError."""
        if name in self.models and not self.models[name].approved:
            raise SetupError(f"model {name!r} has no approved version; `neuronpipe registry approve` approves one")
        return self._with(name, {**_contents(self._model(name)), "is_unloaded": False}, "load", signed)

    def unload(self, name: str, signed: Signed) -> "Registry":
        """Has no version of the model served; names and shares stay. Raises SetupError."""
        return self._with(name, {**_contents(self._model(name)), "is_unloaded": True}, "unload", signed)

    def set_routing(self, name: str, routing: Routing, action: str, signed: Signed) -> "Registry":
        """Sets all names and shares at once. Raises SetupError."""
        return self._with(name, {**_contents(self._model(name)), **_contents(routing)}, action, signed)

    def roll_back(self, name: str, revision: int | None, signed: Signed) -> "Registry":
        """The model's aliases, route and shadow as they were after a revision; None: before the last change of them.

        Raises SetupError.
        """
        model = self._model(name)
        if revision is not None and revision > self.revision:
            raise SetupError(f"revision {revision}: the registry has the revision {self.revision}")
        past = [change for change in self.history if change.model == name]
        if revision is None:
            differing = [one for one in past if one.routing != model.routing]
        else:
            differing = [one for one in past if one.revision <= revision]
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
        self,
        name: str,
        number: int,
        state: ApprovalState,
        signed: Signed,
        known: RegisteredVersion,
        routing: Routing,
    ) -> "Registry":
        model = self.models.get(name, RegisteredModel())
        approval = Approval(state=state, note=signed.note, author=signed.author, time=signed.time)
        versions = dict(sorted({**model.versions, number: known.model_copy(update={"approval": approval})}.items()))
        return self._with(name, {"versions": versions, **_contents(routing)}, f"{state} version {number}", signed)

    def _with(self, name: str, contents: Mapping[str, Any], action: str, signed: Signed) -> "Registry":
        try:
            model = RegisteredModel.model_validate(contents)
        except ValidationError as error:
            raise SetupError(f"model {name!r}: {problems_of(error)}") from error
        change = Change(
            revision=self.revision + 1,
            time=signed.time,
            author=signed.author,
            model=name,
            action=f"{action}: {signed.note}" if signed.note else action,
            **_contents(model.routing),
        )
        return Registry(
            revision=self.revision + 1,
            models=dict(sorted({**self.models, name: model}.items())),
            history=[*self.history, change][-_MAX_HISTORY:],
        )


# What makes the next registry of the present one.
Operation = Callable[[Registry], Registry]


def _contents(model: BaseModel) -> dict[str, Any]:
    """The fields of a model as they are."""
    return {name: getattr(model, name) for name in type(model).model_fields}


def _registered(bundle: Bundle, approval: Approval) -> RegisteredVersion:
    accuracy = {one.backend: one.accuracy for one in bundle.manifest.artifacts if one.accuracy}
    return RegisteredVersion(digest=bundle.digest, approval=approval, accuracy=accuracy)


def _resolved(target: str, aliases: Mapping[str, int]) -> int:
    """The version of a target of a route. Raises ValueError for an alias that the model does not have."""
    if target.isascii() and target.isdigit():
        return int(target)
    if target not in aliases:
        raise ValueError(f"{target!r} is neither a version nor an alias of the model")
    return aliases[target]


def _user() -> str:
    """The name of this process's user; its number in a container that does not know it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _pending(signed: Signed) -> Approval:
    return Approval(state="pending", time=signed.time)
