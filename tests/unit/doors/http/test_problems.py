"""doors/http/problems.py: every error of ours has a status, and its place in every form."""

import pytest

from neuronpipe.core.errors import NeuronpipeError, Overloaded, Unavailable
from neuronpipe.doors.http.problems import (
    CODES,
    COHERE_ERROR,
    OIP_ERROR,
    OPENAI_ERROR,
    PROBLEM_DETAILS,
    TEI_ERROR,
    ErrorForm,
    RequestRefused,
    problem_of,
)
from tests.unit.every_error import EVERY_ERROR


def test_every_error_has_a_status_and_no_two_kinds_of_advice_share_one() -> None:
    assert set(CODES) == {type(error) for error in EVERY_ERROR} == set(NeuronpipeError.__subclasses__())
    statuses = {kind.__name__: codes.status for kind, codes in CODES.items()}
    # WrongTask is a wrong request, too, and a job may be missing like a model; all else tells a caller something else.
    assert statuses.pop("WrongTask") == statuses["InvalidInput"] == 400
    assert statuses.pop("JobNotFound") == statuses["ModelNotFound"] == 404
    assert len(set(statuses.values())) == len(statuses)


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("form", [PROBLEM_DETAILS, OPENAI_ERROR, TEI_ERROR, COHERE_ERROR, OIP_ERROR])
def test_every_form_has_the_message(error: NeuronpipeError, form: ErrorForm) -> None:
    body = form.write(problem_of(error))
    assert error.message in str(body)
    assert set(body) <= {name.removesuffix("?") for name in form.shape}


def test_problem_details_name_the_reason_and_the_field() -> None:
    assert PROBLEM_DETAILS.write(problem_of(EVERY_ERROR[0])) == {
        "type": "about:blank",
        "title": "invalid input",
        "status": 400,
        "detail": "top_k: 5, the model has 4 labels",
        "reason": "INVALID_INPUT",
        "field": "top_k",
    }


def test_openai_has_the_field_as_param() -> None:
    assert OPENAI_ERROR.write(problem_of(EVERY_ERROR[0]))["error"] == {
        "message": "top_k: 5, the model has 4 labels",
        "type": "invalid_request_error",
        "param": "top_k",
        "code": "invalid_input",
    }


def test_only_what_passes_by_itself_says_when_to_retry() -> None:
    kinds = {type(error) for error in EVERY_ERROR if problem_of(error).retry_after_s is not None}
    assert kinds == {Overloaded, Unavailable}


def test_a_refused_request_has_the_headers_of_its_status() -> None:
    problem = problem_of(RequestRefused(405, "method_not_allowed", "takes GET", (b"allow", b"GET")))
    assert problem.codes.status == 405
    assert problem.headers == ((b"allow", b"GET"),)
