"""The limit of the operating system for open files, of which each connection is one."""

import resource

from neuronpipe.core.logs import log_warning

# For everything else: bundles, libraries, pipes, connections to other services.
_OTHER_FILES = 512


def make_room_for(connections: int) -> None:
    """Raises the process's own limit as far as it may; logs a warning where that is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log_warning("max_connections is more than the limit for open files allows", open_files=allowed, needed=wanted)
