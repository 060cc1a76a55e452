"""Reads the values on a page of metrics."""

import ssl
import urllib.request

from demo.processes import ServiceProcess


def series_of(page: ServiceProcess | str, context: ssl.SSLContext | None = None) -> dict[str, float]:
    """Returns the value of each series of a service's page, or of the page at an address."""
    if isinstance(page, ServiceProcess):
        page = f"http{'s' if context else ''}://{page.wait_for('metrics')['address']}/metrics"
    with urllib.request.urlopen(page, timeout=60, context=context) as response:
        lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    assert len(found) == len(lines), "a series stands there twice"
    return found


def metric(page: ServiceProcess | str, name: str, *labels: str) -> float:
    """Adds up the metric's series that have these values of labels; 0 if there are none."""
    found = [(series.partition("{"), value) for series, value in series_of(page).items()]
    return sum(value for (of, _, has), value in found if of == name and all(f'"{label}"' in has for label in labels))
