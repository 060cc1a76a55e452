"""Parses the compiler's flags. Refuses unknown flags, also if the real compiler would accept them."""

import shlex
from collections.abc import Mapping

from torch_neuronx._versions import DEFAULT_AUTO_CAST

_VALUES: Mapping[str, tuple[str, ...] | None] = {
    "--target": ("inf2", "trn1", "trn1n", "trn2"),
    "--model-type": ("generic", "transformer", "unet-inference"),
    "--auto-cast": ("none", "matmult", "all"),
    "--auto-cast-type": ("bf16", "fp16", "tf32", "fp8_e4m3"),
    "--optlevel": ("1", "2", "3"),
    "--logical-nc-config": ("1", "2"),
    "--native-int64": ("default", "enabled", "disabled"),
    "--implicit-integer-downcast": ("default", "all", "none", "list"),
    "--logfile": None,
    "--verbose": ("debug", "info", "warning", "error", "critical"),
}
_SWITCHES = (
    "--enable-mixed-precision-accumulation",
    "--disable-mixed-precision-accumulation",
    "--enable-saturate-infinity",
    "--enable-fast-context-switch",
    "--enable-fast-loading-neuron-binaries",
)
_SHORT = {"-O1": "1", "-O2": "2", "-O3": "3"}


def parse(compiler_args: object) -> dict[str, str]:
    """Returns the flags by name; the last of several values of a flag wins. Raises RuntimeError for unknown flags."""
    if compiler_args is None:
        words = []
    elif isinstance(compiler_args, str):
        words = shlex.split(compiler_args)
    elif isinstance(compiler_args, list) and all(isinstance(word, str) for word in compiler_args):
        words = list(compiler_args)
    else:
        raise TypeError(f"compiler_args: str or list of str, got {type(compiler_args).__name__}")
    flags: dict[str, str] = {}
    while words:
        word = words.pop(0)
        if word in _SHORT:
            flags["--optlevel"] = _SHORT[word]
        elif word in _SWITCHES:
            flags[word] = ""
        else:
            name, separator, value = word.partition("=")
            name = "--optlevel" if name == "-O" else name
            if name not in _VALUES:
                raise RuntimeError(f"neuronx-cc: error: unrecognized arguments: {word}")
            if not separator:
                if not words:
                    raise RuntimeError(f"neuronx-cc: error: argument {name}: expected one argument")
                value = words.pop(0)
            allowed = _VALUES[name]
            if allowed is not None and value not in allowed:
                raise RuntimeError(
                    f"neuronx-cc: error: argument {name}: invalid choice: {value!r} (choose from {', '.join(allowed)})"
                )
            flags[name] = value
    flags.setdefault("--auto-cast", DEFAULT_AUTO_CAST)
    if flags["--auto-cast"] == "none" and "--auto-cast-type" in flags:
        raise RuntimeError("neuronx-cc: error: --auto-cast-type without --auto-cast")
    return flags
