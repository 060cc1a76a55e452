"""What differs between two bundles: the settings of their manifests, and their files by digest."""

import json
from collections.abc import Iterator
from typing import Any

from neuronpipe.bundles.repository import Bundle

_MAX_SHOWN = 60


def differences(before: Bundle, after: Bundle) -> list[str]:
    """A line for each setting and each file that differs, and one that says how many bytes are the same in both."""
    told, said = _settings(before), _settings(after)
    lines = [
        f"{name}: {_shown(told.get(name, 'none'))} -> {_shown(said.get(name, 'none'))}"
        for name in sorted(told.keys() | said.keys())
        if told.get(name) != said.get(name)
    ]
    old, new = before.files.digests, after.files.digests
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            lines.append(f"{name}: only in {before.folder}, {_size(before, name):,} bytes")
        elif name not in old:
            lines.append(f"{name}: only in {after.folder}, {_size(after, name):,} bytes")
        elif old[name] != new[name]:
            lines.append(f"{name}: differs, {_size(before, name):,} -> {_size(after, name):,} bytes")
    held = set(old.values())
    shared = sum(_size(after, name) for name, digest in new.items() if digest in held)
    return [*lines, f"{shared:,} of {sum(_size(after, name) for name in new):,} bytes are the same in both"]


def _settings(bundle: Bundle) -> dict[str, str]:
    """The manifest without its files, each value by its path, as JSON."""
    return dict(_flat("", bundle.manifest.model_dump(mode="json", exclude={"files"})))


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from _flat(f"{path}.{name}" if path else name, one)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for place, one in enumerate(value):
            yield from _flat(f"{path}[{place}]", one)
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _shown(written: str) -> str:
    return written if len(written) <= _MAX_SHOWN else f"{written[:_MAX_SHOWN]}…"


def _size(bundle: Bundle, name: str) -> int:
    return (bundle.folder / name).stat().st_size
