"""gateway/admission.py: who is let in, who is turned away with what advice, and who has to make room."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.callers import Caller
from neuronpipe.core.calls import Call
from neuronpipe.core.deadlines import HeldTime
from neuronpipe.core.errors import DeadlineExceeded, Overloaded
from neuronpipe.core.metrics import Meters
from neuronpipe.gateway.admission import Admission, AdmissionControl
from neuronpipe.gateway.tenants.tenants import Rights, Tenants
from tests.suite.fixed_clock import FixedClock


@pytest.fixture(autouse=True)
def told_time(clock: FixedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine would make answers late."""
    monkeypatch.setattr(time, "monotonic", clock)


def _call(is_bulk: bool = False) -> Call:
    return Call(priority=Priority.PRIORITY_BULK if is_bulk else Priority.PRIORITY_INTERACTIVE)


class _Crowd:
    """Requests inside a control, and the ones of them that were shed."""

    def __init__(self, control: AdmissionControl) -> None:
        self.control = control
        self.shed: list[str] = []
        self.admissions: dict[str, Admission] = {}
        self._inside: dict[str, ExitStack] = {}

    def enter(self, name: str, tokens: int = 1, *, is_bulk: bool = False) -> Admission:
        """A quarter of a token a byte is what the control assumes before it knows better."""
        stack = ExitStack()
        admitted = self.control.admit(_call(is_bulk), tokens * 4, model="m", shed=lambda: self.shed.append(name))
        admission = stack.enter_context(admitted)
        self._inside[name], self.admissions[name] = stack, admission
        return admission

    def leave(self, name: str) -> None:
        self._inside.pop(name).close()

    def leave_all(self) -> None:
        for name in list(self._inside):
            self.leave(name)


CrowdOf = Callable[[AdmissionControl], _Crowd]
_TWO_REQUESTS = r"^2 requests in flight, the limit is 2 \(the gateway's max_requests_in_flight\)$"


@pytest.fixture
def crowd_of() -> Iterator[CrowdOf]:
    crowds: list[_Crowd] = []

    def make(control: AdmissionControl) -> _Crowd:
        crowds.append(_Crowd(control))
        return crowds[-1]

    yield make
    for crowd in crowds:
        crowd.leave_all()


@pytest.mark.parametrize(
    ("limits", "inside", "is_bulk", "problem"),
    [
        pytest.param((2, 100), [1, 1], False, _TWO_REQUESTS, id="requests up to the limit"),
        pytest.param((100, 10), [6, 4], False, "requests|tokens", id="tokens up to the limit"),
        pytest.param((10, 10), [50], False, "requests|tokens", id="a request larger than the gate where that is empty"),
        pytest.param((1, 100), [1], False, "requests|tokens", id="interactive requests, of which none is shed"),
        pytest.param((1, 100), [1], True, "requests|tokens", id="bulk requests, which shed no request"),
    ],
)
def test_what_is_let_in(
    crowd_of: CrowdOf, limits: tuple[int, int], inside: list[int], is_bulk: bool, problem: str
) -> None:
    crowd = crowd_of(AdmissionControl(*limits))
    for number, tokens in enumerate(inside):
        crowd.enter(str(number), tokens, is_bulk=is_bulk)
    with pytest.raises(Overloaded, match=problem):
        crowd.enter("next", is_bulk=is_bulk)
    assert not crowd.shed


def test_the_share_in_flight_is_that_of_the_limit_which_is_nearer(crowd_of: CrowdOf) -> None:
    control = AdmissionControl(max_requests=4, max_tokens=10)
    crowd = crowd_of(control)
    crowd.enter("a", tokens=1)
    assert control.fullness == 0.25
    crowd.enter("b", tokens=7)
    assert control.fullness == 0.8
    crowd.leave("b")
    assert control.fullness == 0.25


def test_whoever_leaves_makes_room(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=1, max_tokens=100))
    crowd.enter("a")
    crowd.leave("a")
    crowd.enter("b")


def test_a_requests_real_tokens_replace_the_estimate(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=100, max_tokens=10))
    crowd.enter("a", tokens=2).count(10)
    with pytest.raises(Overloaded, match="about 10 tokens"):
        crowd.enter("b", tokens=1)
    crowd.leave("a")
    crowd.enter("c", tokens=5)


def test_the_estimate_follows_what_requests_turn_out_to_have(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=10_000, max_tokens=1_000_000))
    for number in range(200):
        crowd.enter(f"{number}", tokens=100).count(400)  # a token a byte
    # 0.95 to the power of 200 of the way from 0.25 to 1 is left, which rounds to nothing.
    assert crowd.enter("next", tokens=100).tokens == 400


def test_bulk_requests_leave_a_quarter_of_the_gate_to_interactive_ones(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=4, max_tokens=100))
    for name in "abc":
        crowd.enter(name, is_bulk=True)
    problem = r"^3 requests .* bulk requests is 3 \(of the gateway's max_requests_in_flight, 4\)$"
    with pytest.raises(Overloaded, match=problem):
        crowd.enter("d", is_bulk=True)
    crowd.enter("e")
    assert not crowd.shed


def test_an_interactive_request_sheds_the_newest_bulk_requests_as_far_as_it_needs_the_room(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=100, max_tokens=8))
    for name in "abc":
        crowd.enter(name, tokens=2, is_bulk=True)
    crowd.enter("d", tokens=5)
    assert crowd.shed == ["c", "b"]
    assert crowd.control.shed_error(crowd.admissions["c"]).message == (
        "the request was ended to make room for interactive requests (the gateway's max_requests_in_flight, "
        "max_tokens_in_flight)"
    )


def test_an_interactive_request_that_would_not_fit_anyway_sheds_nobody(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=100, max_tokens=10))
    crowd.enter("a", tokens=6)
    crowd.enter("b", tokens=1, is_bulk=True)
    with pytest.raises(Overloaded):
        crowd.enter("c", tokens=5)
    assert not crowd.shed


def test_an_interactive_request_larger_than_the_gate_sheds_all_to_find_it_empty(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=100, max_tokens=10))
    crowd.enter("a", tokens=1, is_bulk=True)
    crowd.enter("b", tokens=11)
    assert crowd.shed == ["a"]


def test_many_windows_of_one_context_do_not_make_all_texts_look_long(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=100, max_tokens=1 << 20))
    crowd.enter("windows", tokens=2500).count(400_000)  # 10 KB
    # A twentieth of the way from a quarter to one token a byte.
    assert crowd.enter("next", tokens=1000).tokens == 1150


def test_a_shed_request_counts_no_more_when_it_leaves(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=1, max_tokens=100))
    place = crowd.enter("a", is_bulk=True)
    crowd.enter("b")
    place.count(50)
    crowd.leave("a")
    assert place.is_shed
    with pytest.raises(Overloaded, match="1 requests in flight, the limit is 1"):
        crowd.enter("c")


def test_the_advice_is_how_long_what_is_too_much_takes_to_drain(clock: FixedClock, crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=100, max_tokens=10))
    # 20 tokens drain within the window of two seconds: 10 a second, counted as they leave.
    for number in range(4):
        crowd.enter(f"{number}", tokens=5)
        crowd.leave(f"{number}")
    crowd.enter("a", tokens=10)
    with pytest.raises(Overloaded) as refused:
        crowd.enter("b", tokens=7)
    assert refused.value.retry_after_s == pytest.approx(0.7)


def test_the_advice_grows_as_nothing_drains_and_has_an_end(clock: FixedClock, crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=1, max_tokens=100))
    crowd.enter("a")
    crowd.leave("a")
    crowd.enter("b")
    waits_s = []
    for _ in range(3):
        with pytest.raises(Overloaded) as refused:
            crowd.enter("c")
        waits_s.append(refused.value.retry_after_s)
        clock.now_s += 2
    # One request in the window of two seconds; with every two seconds a rate of 1/e.
    assert waits_s == [pytest.approx(2), pytest.approx(2 * 2.718281828), pytest.approx(10)]


def test_the_advice_is_never_to_come_back_at_once(clock: FixedClock, crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=1, max_tokens=1_000_000))
    for number in range(1000):
        crowd.enter(f"{number}")
        crowd.leave(f"{number}")
    crowd.enter("a")
    with pytest.raises(Overloaded) as refused:
        crowd.enter("b")
    assert refused.value.retry_after_s == 0.05


def test_what_is_known_beforehand_is_neither_corrected_nor_taken_for_an_example() -> None:
    control = AdmissionControl(10, 100)
    with control.admit(_call(), 1_000_000, 60, model="m", shed=lambda: None) as place:
        place.count(5)
        assert control.in_flight == (1, 60)
        with control.admit(_call(), 80, model="m", shed=lambda: None):  # a quarter of a token a byte
            assert control.in_flight == (2, 80)


def test_a_request_whose_estimate_let_in_too_much_is_refused_once_it_is_counted(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=100, max_tokens=10))
    crowd.enter("a", tokens=6)
    admission = crowd.enter("b", tokens=2)
    problem = r"^about 8 tokens in flight, the limit is 10 \(the gateway's max_tokens_in_flight\)$"
    with pytest.raises(Overloaded, match=problem):
        admission.count(5)
    crowd.leave("b")
    crowd.enter("c", tokens=4)


def test_a_request_that_is_alone_may_turn_out_larger_than_the_gate(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=100, max_tokens=10))
    crowd.enter("a", tokens=2).count(400_000)
    assert crowd.control.in_flight == (1, 400_000)


def test_a_request_that_turns_out_larger_sheds_bulk_requests_before_it_is_refused(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=100, max_tokens=10))
    crowd.enter("bulk", tokens=4, is_bulk=True)
    crowd.enter("a", tokens=2).count(8)
    assert crowd.shed == ["bulk"]
    assert crowd.control.in_flight == (1, 8)


def test_a_bulk_request_whose_estimate_was_right_stays_though_interactive_ones_fill_the_gate(crowd_of: CrowdOf) -> None:
    crowd = crowd_of(AdmissionControl(max_requests=4, max_tokens=100))
    bulk = crowd.enter("bulk", tokens=2, is_bulk=True)
    for name in "abc":
        crowd.enter(name)
    bulk.count(3)
    assert crowd.control.in_flight == (4, 6)


def _crowded(crowd_of: CrowdOf, requests: int = 20) -> tuple[AdmissionControl, _Crowd]:
    """A control with requests inside, out of which ten went in the last moment."""
    control = AdmissionControl(100, 1_000_000)
    crowd = crowd_of(control)
    for number in range(requests + 10):
        crowd.enter(str(number))
    for number in range(10):
        crowd.leave(str(number))
    return control, crowd


def test_without_a_late_request_none_is_refused_before_it_is_read(crowd_of: CrowdOf) -> None:
    control, _ = _crowded(crowd_of)
    control.check_room(0.001)


def test_after_a_late_request_those_that_would_be_late_too_are_refused_before_they_are_read(crowd_of: CrowdOf) -> None:
    control, crowd = _crowded(crowd_of)
    crowd.admissions["10"].note_late()
    with pytest.raises(Overloaded, match=r"^the deadline would pass before the result is ready$") as refused:
        control.check_room(2.0)  # ten in two seconds: the twenty inside take four
    assert refused.value.retry_after_s == pytest.approx(2.0, abs=0.3)
    control.check_room(6.0)
    control.check_room(None)


def test_few_requests_inside_are_no_overload(crowd_of: CrowdOf) -> None:
    control, crowd = _crowded(crowd_of, requests=15)
    crowd.admissions["10"].note_late()
    control.check_room(0.001)


def test_an_overload_is_over_when_for_a_second_none_was_late_or_refused(crowd_of: CrowdOf, clock: FixedClock) -> None:
    control, crowd = _crowded(crowd_of)
    crowd.admissions["10"].note_late()
    for _ in range(3):
        clock.now_s += 0.9
        with pytest.raises(Overloaded):
            control.check_room(0.1)
    clock.now_s += 1.1
    control.check_room(0.1)


def test_a_full_gate_refuses_before_a_request_is_read_but_where_bulk_work_can_make_room(crowd_of: CrowdOf) -> None:
    control = AdmissionControl(4, 100)
    crowd = crowd_of(control)
    for name in "abc":
        crowd.enter(name)
    control.check_room(None)
    crowd.enter("d", is_bulk=False)
    with pytest.raises(Overloaded, match="4 requests"):
        control.check_room(None)
    crowd.leave("d")
    crowd.leave("c")
    crowd.enter("e", is_bulk=True)
    crowd.enter("f")
    control.check_room(None)


def test_a_refusal_that_many_callers_get_keeps_none_of_those_before(clock: FixedClock, crowd_of: CrowdOf) -> None:
    control = AdmissionControl(1, 100)
    crowd_of(control).enter("a")
    depths = []
    for _ in range(3):
        with pytest.raises(Overloaded) as refused:
            control.check_room(None)
        depths.append(len(refused.traceback))
    assert depths == depths[:1] * 3


def _answering_in_a_tenth_of_a_second(crowd_of: CrowdOf, clock: FixedClock) -> tuple[AdmissionControl, _Crowd]:
    control = AdmissionControl(100, 1000)
    crowd = crowd_of(control)
    for _ in range(100):
        crowd.enter("a")
        clock.now_s += 0.1
        crowd.leave("a")
    return control, crowd


def test_after_a_late_request_those_with_too_little_time_are_refused(crowd_of: CrowdOf, clock: FixedClock) -> None:
    control, crowd = _answering_in_a_tenth_of_a_second(crowd_of, clock)
    control.check_room(0.02)
    crowd.enter("late").note_late()
    problem = r"would pass before the result is ready: answers of model 'm' take about 0\.099 s now"
    with pytest.raises(DeadlineExceeded, match=problem):
        control.check_room(0.02)
    control.check_room(0.1)


def test_the_time_in_which_requests_were_held_is_not_expected_of_others(crowd_of: CrowdOf, clock: FixedClock) -> None:
    control = AdmissionControl(100, 1000)
    crowd = crowd_of(control)
    for _ in range(100):
        admission = crowd.enter("a")
        clock.now_s += 60
        admission.held = HeldTime(59_900_000_000)
        crowd.leave("a")
    crowd.enter("late").note_late()
    control.check_room(0.1)


def test_a_hopeless_request_that_is_no_longer_held_says_nothing_of_others(crowd_of: CrowdOf, clock: FixedClock) -> None:
    control, _ = _answering_in_a_tenth_of_a_second(crowd_of, clock)
    with control.admit(Call(deadline_s=clock.now_s + 60), 4, model="m", shed=lambda: None) as held:
        held.held = HeldTime(59_990_000_000)  # an answer takes 0.1 s
        held.note_late()
        control.check_room(0.02)
        held.held = HeldTime(30_000_000_000)
        held.note_late()
        with pytest.raises(DeadlineExceeded):
            control.check_room(0.02)


class _Tenants:
    """A control of tenants who all have the same rights, and whose requests are answered or late as the test says."""

    def __init__(self, clock: FixedClock, max_requests: int = 100, **model_limits: int) -> None:
        self._clock = clock
        self.shed: list[str] = []
        tenants = Tenants(lambda name: Rights(), (max_requests, 1000), 0.02, Meters(), lambda: clock.now_s)
        self.control = AdmissionControl(max_requests, 1000, tenants, model_limits)

    def enter(self, tenant: str, model: str = "m", remaining_s: float | None = None) -> Admission:
        deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
        call = Call(caller=Caller(tenant, tenant), deadline_s=deadline_s)
        return self.control.admit(call, 4, model=model, shed=lambda: self.shed.append(tenant))

    def answer(self, tenant: str, seconds: float, model: str = "m", times: int = 100) -> None:
        for _ in range(times):
            with self.enter(tenant, model):
                self._clock.now_s += seconds

    def late(self, tenant: str, remaining_s: float, model: str = "m") -> None:
        with suppress(DeadlineExceeded), self.enter(tenant, model, remaining_s) as admission:
            admission.note_late()
            raise DeadlineExceeded("late")


@pytest.mark.parametrize("model", ["m", "generator"])
def test_long_answers_and_late_requests_of_one_tenant_refuse_no_other(clock: FixedClock, model: str) -> None:
    system = _Tenants(clock)
    system.answer("victim", 0.02)
    system.answer("mallory", 6.0, model)
    for remaining_s in (0.02, 3.5, 5.9):
        system.late("mallory", remaining_s, model)
        system.control.check_room(0.3, "victim")
        system.enter("victim", remaining_s=0.3).__exit__(None)
        system.control.check_room(0.3, "a new tenant")


def test_a_deadline_that_was_hopeless_when_it_came_is_no_overload(clock: FixedClock) -> None:
    system = _Tenants(clock)
    system.answer("a", 1.0)
    system.late("a", 0.02)
    system.control.check_room(0.4, "a")
    system.late("a", 0.9)
    with pytest.raises(DeadlineExceeded):
        system.control.check_room(0.4, "a")


def test_a_tenant_whose_requests_were_refused_is_let_in_again(clock: FixedClock) -> None:
    system = _Tenants(clock)
    system.answer("a", 6.0)
    system.late("a", 5.0)
    with pytest.raises(DeadlineExceeded):
        system.control.check_room(0.3, "a")
    clock.now_s += 1.1
    system.answer("a", 0.02, times=60)
    system.late("a", 0.3)
    system.control.check_room(0.3, "a")


def test_a_call_is_refused_before_it_is_read_only_if_each_model_of_its_tenant_refuses_it(clock: FixedClock) -> None:
    system = _Tenants(clock)
    system.answer("a", 1.0, "slow")
    system.late("a", 0.9, "slow")
    with pytest.raises(DeadlineExceeded):
        system.control.check_room(0.3, "a")
    system.answer("a", 0.01, "quick", times=1)
    system.control.check_room(0.3, "a")
    with pytest.raises(DeadlineExceeded):
        system.enter("a", "slow", 0.3)


def test_a_flood_of_one_tenant_is_an_overload_for_that_tenant_only(clock: FixedClock) -> None:
    system = _Tenants(clock)
    system.answer("victim", 0.02, times=10)
    for _ in range(50):
        system.enter("mallory")
    system.enter("mallory").note_late()
    with pytest.raises(Overloaded):
        system.control.check_room(0.3, "mallory")
    system.control.check_room(0.3, "victim")


def test_a_refusal_does_not_tell_a_tenant_what_others_have_in_flight(clock: FixedClock) -> None:
    system = _Tenants(clock, max_requests=2)
    system.enter("a")
    system.enter("b")
    with pytest.raises(Overloaded) as refused:
        system.enter("c")
    assert refused.value.message == "too many requests in flight, the limit is 2 (the gateway's max_requests_in_flight)"


def test_a_full_model_takes_the_request_of_a_tenant_that_has_less_of_it(clock: FixedClock) -> None:
    system = _Tenants(clock, small=3)
    for tenant in ("mallory", "mallory", "mallory"):
        system.enter(tenant, "small")
    problem = r"^model 'small': 3 requests in flight, the limit is 3 \(the gateway's model_concurrency\)$"
    with pytest.raises(Overloaded, match=problem):
        system.enter("mallory", "small")
    system.enter("victim", "small")
    assert system.shed == ["mallory"]
    with pytest.raises(Overloaded):  # two and one: another one would be no fairer
        system.enter("victim", "small")


def test_a_model_forgets_tenants_that_are_idle(clock: FixedClock) -> None:
    system = _Tenants(clock)
    inside = system.enter("busy")
    for number in range(5000):
        system.answer(f"tenant {number}", 0.01, times=1)
    assert len(inside.model._tenants) <= 1000
    assert inside.model.tenant_load("busy") is inside.tenant_load
    assert inside.model.tenant_load("tenant 4999")


def test_one_tenants_dense_texts_do_not_make_anothers_look_long(clock: FixedClock) -> None:
    system = _Tenants(clock)
    for _ in range(200):
        with system.enter("mallory") as admission:
            admission.count(4)  # a token a byte
    assert (system.enter("mallory").tokens, system.enter("victim").tokens) == (4, 1)
