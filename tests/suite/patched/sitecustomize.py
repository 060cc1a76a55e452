"""Gives constants the values that tests/suite/constants.py says. Python imports this module as a process starts."""

import importlib
import json
import os

for _place, _value in json.loads(os.environ.get("NEURONPIPE_TESTS_CONSTANTS", "{}")).items():
    _module, _, _path = _place.partition(":")
    _owner = importlib.import_module(_module)
    *_owners, _name = _path.split(".")
    for _part in _owners:
        _owner = getattr(_owner, _part)
    getattr(_owner, _name)  # raises if the constant does not exist
    setattr(_owner, _name, _value)
