"""OpenVINO, without its telemetry, and its one engine of this process."""

import functools
import sys

# OpenVINO reports over the network that it is imported and what it converts, unless this package of its is missing: then it takes the
# stub in openvino/tools/ovc/telemetry_stub.py. The documented way out, `opt_in_out --opt_out`, writes to the user's home.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402

__all__ = ["engine", "has_bfloat16", "openvino"]


@functools.cache
def engine() -> openvino.Core:
    """The one of this process, which never ends.

    On OpenVINO 2026.4 engines that do not end in the reverse order of their making leave the thread a stack for signals that is freed
    already: the next signal then ends the process. (They set it for their CPU plugin, and set back what they found.)
    """
    core = openvino.Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin, so that those of others, NNCF's, come and go within its time
    # On 2026.4 two threads that need its table of dtypes for the first time at once wait for each other for ever: one holds the
    # interpreter's lock and waits for the table, the other makes the table and waits for the lock.
    openvino.Type.f32.to_dtype()
    return core


def has_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16."""
    return "BF16" in engine().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
