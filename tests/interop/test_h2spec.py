"""h2spec (summerwind/h2spec), the conformance tests of HTTP/2. `make interop` builds it."""

import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.interop.results import Result
from tests.interop.run import PLAIN, running_echo

pytestmark = [pytest.mark.local_only, pytest.mark.long]

_H2SPEC = Path(".cache/interop/h2spec").absolute()
# Of h2spec 2.6; one that has others needs another look.
_CASES = 146
_IGNORED = "nghttp2 ignores frames of a stream that is over, whichever side ended it"
_PRIORITY = "nghttp2 ignores PRIORITY, which RFC 9113 deprecates"
# Whether it passes depends on when the body comes.
_BODY = (
    "http2/8.1.2.6",
    'Sends a HEADERS frame with the "content-length" header field which does not equal the sum of the multiple '
    "DATA frames payload length",
)
# (section, case) → why it fails. Every other case passes.
_FAILS = {
    ("http2/5.1", "closed: Sends a DATA frame after sending RST_STREAM frame"): _IGNORED,
    ("http2/5.1", "closed: Sends a HEADERS frame after sending RST_STREAM frame"): _IGNORED,
    ("http2/5.1", "closed: Sends a DATA frame"): _IGNORED,
    ("http2/5.1", "closed: Sends a HEADERS frame"): _IGNORED,
    (
        "http2/5.1.1",
        "Sends stream identifier that is numerically smaller than previous",
    ): "nghttp2 takes it for a frame of a stream that is over",
    ("http2/5.3.1", "Sends PRIORITY frame that depend on itself"): _PRIORITY,
    ("http2/6.3", "Sends a PRIORITY frame with 0x0 stream identifier"): _PRIORITY,
    (
        "http2/6.9.1",
        "Sends multiple WINDOW_UPDATE frames increasing the flow control window to above 2^31-1 on a stream",
    ): "nghttp2 ends the connection with FLOW_CONTROL_ERROR, and not the stream alone",
    _BODY: "a request that is no gRPC is answered before its body comes",
}


@pytest.mark.timeout(900)
def test_the_connection_conforms_to_http2_but_for_what_is_explained(
    request: pytest.FixtureRequest, tmp_path: Path, results: list[Result]
) -> None:
    if not _H2SPEC.exists() and not request.config.getoption("every_client"):
        pytest.skip("`make interop` builds h2spec")
    report = tmp_path / "report.xml"
    with running_echo() as server:
        host, _, port = server.process.target.rpartition(":")
        subprocess.run(
            [str(_H2SPEC), "-h", host, "-p", port, "-P", "/neuronpipe.tests.Echo/Echo", "-o", "4", "-j", str(report)],
            check=False,
            capture_output=True,
        )
    cases = {
        (case.attrib["package"], case.attrib["classname"]): len(case) == 0
        for case in ElementTree.parse(report).iter("testcase")
    }
    failed = {case for case, is_passed in cases.items() if not is_passed}
    assert len(cases) == _CASES
    figures = {"cases": len(cases), "passed": len(cases) - len(failed)}
    results.append(Result("h2spec", PLAIN, "all", figures=figures))
    results.extend(Result("h2spec", PLAIN, " ".join(case), "fails", _FAILS.get(case, "")) for case in sorted(failed))
    assert failed - _FAILS.keys() == set()
    assert _FAILS.keys() - failed <= {_BODY}, "these pass now"
