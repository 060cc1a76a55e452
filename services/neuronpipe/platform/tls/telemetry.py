"""What metrics tell of certificates."""

from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.platform.tls.files import Side, WatchedTls


def show_tls(meters: Meters, side: Side, watched: WatchedTls) -> None:
    """Adds the metrics of one side's files."""
    meters.gauge(Metrics.TLS_REJECTED, lambda: float(bool(watched.problem)), side)
    if watched.value.certificate:
        meters.gauge(Metrics.TLS_EXPIRY, lambda: watched.value.expires_s * 1e9, side)
