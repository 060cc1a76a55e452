"""Reads metrics of a service from its page."""

import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence

from prometheus_client.parser import text_string_to_metric_families

from neuronpipe.core.errors import SetupError
from neuronpipe.core.names import Instrument
from neuronpipe.platform.telemetry.prometheus import prometheus_name, series_names

_MAX_BYTES = 64 << 20
_TIMEOUT_S = 10.0


def scrape(
    url: str,
    instruments: Collection[Instrument],
    headers: Sequence[tuple[str, str]] = (),
    tls: ssl.SSLContext | None = None,
) -> dict[tuple[str, ...], float]:
    """The numbers of some metrics, by the metric's name, the suffix of the series, the values of its labels, and for
    the suffix _bucket the upper bound. Raises SetupError for a page that cannot be read.
    """
    if not url.startswith(("http://", "https://")):
        raise SetupError(f"{url}: is not the address of a page of metrics, as in http://127.0.0.1:9464/metrics")
    request = urllib.request.Request(url, headers={"accept": "text/plain", **dict(headers)})  # noqa: S310 (see above)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=tls) as response:  # noqa: S310
            return read_page(response.read(_MAX_BYTES).decode(), instruments)
    except (OSError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            raise SetupError(f"{url}: answers {error.code} {error.reason}") from error
        raise SetupError(f"{url}: its metrics cannot be read ({getattr(error, 'reason', error)})") from error


def read_page(page: str, instruments: Collection[Instrument]) -> dict[tuple[str, ...], float]:
    """See scrape. Raises ValueError for what is no page of metrics."""
    wanted = {name: instrument for instrument in instruments for name in series_names(instrument)}
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if not (instrument := wanted.get(sample.name)):
                continue
            suffix = sample.name.removeprefix(prometheus_name(instrument))
            labels = [sample.labels.get(label.replace(".", "_"), "") for label in instrument.labels]
            bound = [sample.labels["le"]] if suffix == "_bucket" else []
            found[instrument.name, suffix, *labels, *bound] = sample.value
    return found
