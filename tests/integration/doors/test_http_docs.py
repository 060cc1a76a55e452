"""docs/http.md: its table of errors is the code's. tests/repository/test_snippets.py runs its examples."""

from pathlib import Path

from google.rpc import code_pb2

from neuronpipe.core.status import CODES as GRPC_CODES
from neuronpipe.doors.http.problems import CODES

_PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text()


def test_the_table_of_errors_is_the_codes() -> None:
    rows = [
        f"| {kind.__name__} | {code_pb2.Code.Name(GRPC_CODES[kind])} | {codes.status} | {codes.openai_type} | "
        f"{codes.openai_code} "
        f"| {codes.tei_type} |"
        for kind, codes in CODES.items()
    ]
    assert "\n".join(rows) in _PAGE
