"""gateway/tenants/tenants.py, behind the control: quotas, and whose requests make room for whose."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.callers import ANONYMOUS, Caller
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Overloaded
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Counter, Meters
from neuronpipe.core.model import ModelTable
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.admission import Admission, AdmissionControl
from neuronpipe.gateway.tenant_turns import REQUEST_TOKENS, TenantTurns, Turn
from neuronpipe.gateway.tenants.tenants import NOTHING, Rights, Tenants
from tests.suite.waiting import cancelled

_MODEL = ModelKey("m", 1)


class _Gate:
    """A control with tenants, and a clock under the test's control."""

    def __init__(self, max_requests: int = 8, max_tokens: int = 1000, **rights: Rights) -> None:
        self.now_s = 10.0
        self.rights = rights
        self.meters = Meters()
        self.shed: list[str] = []
        self.tenants = Tenants(
            lambda name: self.rights.get(name, Rights()), (max_requests, max_tokens), 0.05, self.meters, self._clock
        )
        self.control = AdmissionControl(max_requests, max_tokens, self.tenants)
        self._stack = ExitStack()

    def _clock(self) -> float:
        return self.now_s

    def enter(self, name: str, tokens: int = 1, new_tokens: int = 0, *, is_bulk: bool = False) -> Admission:
        """A request of the tenant that the first letter of its name stands for."""
        priority = Priority.PRIORITY_BULK if is_bulk else Priority.PRIORITY_INTERACTIVE
        call = Call(priority=priority, caller=Caller("x", name[0]))
        admission = self.control.admit(
            call, 0, tokens, model="m", new_tokens=new_tokens, shed=lambda: self.shed.append(name)
        )
        return self._stack.enter_context(admission)

    def leave(self, admission: Admission) -> None:
        admission.__exit__(None, None, None)
        admission.shed_for = "the test"  # so that the stack leaves it alone

    def close(self) -> None:
        self._stack.close()

    def level(self, tenant: str) -> float:
        bucket = self.tenants._tenant(tenant).bucket
        assert bucket
        return bucket.level

    def tokens(self, tenant: str) -> float:
        counter = self.meters.counter(Metrics.TENANT_TOKENS, tenant)
        assert isinstance(counter, Counter)
        return counter.value

    def refusals(self, tenant: str, quota: str) -> float:
        counter = self.meters.counter(Metrics.TENANT_REFUSED, tenant, quota)
        assert isinstance(counter, Counter)
        return counter.value


@pytest.fixture
def gates() -> Iterator[list[_Gate]]:
    made: list[_Gate] = []
    yield made
    for control in made:
        control.close()


def _with(gates: list[_Gate], **options: object) -> _Gate:
    gates.append(_Gate(**options))  # type: ignore[arg-type]
    return gates[-1]


def test_a_tenant_has_so_many_requests_in_flight(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(max_requests_in_flight=2))
    control.enter("a1")
    control.enter("a2")
    with pytest.raises(Overloaded, match="tenant 'a': 2 requests in flight, the limit is 2"):
        control.enter("a3")
    control.enter("b1")
    assert control.refusals("a", "requests_in_flight") == 1


def test_a_tenant_has_so_many_tokens_in_flight(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(max_tokens_in_flight=10))
    first = control.enter("a1", 8)
    with pytest.raises(Overloaded, match="tenant 'a': about 8 tokens in flight, the limit is 10"):
        control.enter("a2", 3)
    control.leave(first)
    control.enter("a3", 3)


def test_a_request_larger_than_the_quota_is_let_in_alone(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(max_tokens_in_flight=10))
    control.enter("a1", 500)
    with pytest.raises(Overloaded):
        control.enter("a2", 1)


def test_a_budget_says_when_to_come_back(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(tokens_per_minute=60))
    _run(control, control.enter("a1", 60))
    with pytest.raises(Overloaded, match="tenant 'a': the limit is 60 tokens a minute") as raised:
        control.enter("a2", 7)
    assert raised.value.retry_after_s == 7
    control.now_s += 7
    control.enter("a3", 7)


def test_a_tenant_without_budget_is_refused_before_its_message_is_read(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(tokens_per_minute=60))
    _run(control, control.enter("a1", 100))
    with pytest.raises(Overloaded) as raised:
        control.control.check_room(None, "a")
    assert raised.value.retry_after_s == 41  # a debt of 40, and one for the next
    control.control.check_room(None, "b")


def test_a_request_that_never_ran_costs_nothing(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(tokens_per_minute=60))
    control.leave(control.enter("a1", 60))
    control.enter("a2", 60)


def test_real_tokens_replace_the_estimate_in_the_budget(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(tokens_per_minute=60))
    call = Call(caller=Caller("x", "a"))
    with control.control.admit(
        call, 40, model="m", shed=lambda: None
    ) as admission:  # ten tokens, a quarter of a token a byte
        admission.count(50)
        with pytest.raises(Overloaded):
            control.enter("a2", 11)
        control.enter("a3", 10)


def test_tokens_that_would_be_generated_count_before_they_are(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(tokens_per_minute=1000, max_tokens_in_flight=1000))
    for _ in range(4):  # of 128 prompts of one token, and 200 new ones each
        control.enter("a", 1, 200)
    with pytest.raises(Overloaded, match="tenant 'a'"):
        control.enter("a", 1, 200)


def test_a_budget_pays_what_was_generated_not_what_was_asked_for(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(tokens_per_minute=1000))
    admission = control.enter("a", 10, 900)

    async def run() -> None:
        async with admission.turn(_MODEL):
            admission.count(10, 900)
            admission.charge(70)

    asyncio.run(run())
    control.leave(admission)
    assert control.level("a") == 920
    assert control.tokens("a") == 80


async def test_a_request_has_what_each_costs_beside_its_tokens(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights())
    call = Call(caller=Caller("x", "a"))
    with control.control.admit(call, 40, model="m", shed=lambda: None) as admission:  # ten tokens
        async with admission.turn(_MODEL):
            assert admission.own_turn
            assert admission.own_turn.tokens == REQUEST_TOKENS + 10
            admission.count(3)
            assert admission.own_turn.tokens == REQUEST_TOKENS + 3


async def test_tenants_are_several_for_a_while_after_another_ones_request(gates: list[_Gate]) -> None:
    control = _with(gates)
    seen = []
    for name in ("a", "a", "b", "b"):
        async with control.enter(name).turn(_MODEL):
            seen.append(control.tenants.are_several)
    control.now_s += 3
    assert [*seen, control.tenants.are_several] == [False, False, True, True, False]


def test_a_request_that_turns_out_larger_than_its_budget_is_refused(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(tokens_per_minute=60, max_tokens_in_flight=1000))
    call = Call(caller=Caller("x", "a"))
    with control.control.admit(call, 40, model="m", shed=lambda: None) as admission:  # ten tokens
        control.enter("a2", 30)
        with pytest.raises(Overloaded, match="tenant 'a': the limit is 60 tokens a minute"):
            admission.count(31)
        admission.count(30)
        assert control.level("a") == 0


def test_a_request_that_turns_out_larger_than_what_its_tenant_may_have_in_flight_is_refused(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(max_tokens_in_flight=50))
    call = Call(caller=Caller("x", "a"))
    with control.control.admit(call, 40, model="m", shed=lambda: None) as admission:  # ten tokens
        other = control.enter("a2", 30)
        with pytest.raises(Overloaded, match="tenant 'a': about 40 tokens in flight, the limit is 50"):
            admission.count(20, 1)
        control.leave(other)
        admission.count(20, 1000)  # alone


def test_a_request_larger_than_a_minutes_budget_leaves_its_debt_whole(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(tokens_per_minute=60))
    admission = control.enter("a", 10, 1000)
    admission.count(10, 1000)

    async def run() -> None:
        async with admission.turn(_MODEL):
            admission.charge(1000)

    asyncio.run(run())
    control.leave(admission)
    control.now_s += 900  # of 950 tokens that are owed
    with pytest.raises(Overloaded):
        control.enter("a", 1)
    control.now_s += 52
    control.enter("a", 1)


def test_idle_tenants_are_forgotten_with_their_metrics(gates: list[_Gate]) -> None:
    control = _with(gates, max_requests=10_000)
    control.rights = {f"{n}": Rights(tokens_per_minute=10**6) for n in range(10)}
    control.enter("k")
    for number in range(5000):
        control.tenants.check(f"tenant {number}")
    assert len(control.tenants._tenants) <= 1000
    assert "k" in control.tenants._tenants
    in_flight = next(family for family in control.meters.families() if family.instrument is Metrics.TENANT_IN_FLIGHT)
    waits = next(family for family in control.meters.families() if family.instrument is Metrics.TENANT_WAIT)
    assert len(in_flight.series) == len(waits.series) == len(control.tenants._tenants)


def test_a_tenant_in_debt_is_not_forgotten(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(tokens_per_minute=60))
    _run(control, control.enter("a", 600))
    for number in range(3000):
        control.tenants.check(f"tenant {number}")
    with pytest.raises(Overloaded):
        control.enter("a")


def test_the_time_until_its_turn_is_recorded_in_nanoseconds(gates: list[_Gate]) -> None:
    control = _with(gates)

    class Slow(TenantTurns):
        async def take(self, turn: Turn) -> None:
            control.now_s += 0.25
            await super().take(turn)

    control.tenants._turns[_MODEL] = Slow(0.05, control._clock)
    _run(control, control.enter("a"))
    assert control.meters.histogram(Metrics.TENANT_WAIT, "a").total == 0.25e9


def test_rights_count_as_they_are_now(gates: list[_Gate]) -> None:
    control = _with(gates, a=Rights(max_requests_in_flight=1))
    control.enter("a1")
    control.rights["a"] = Rights(max_requests_in_flight=2)
    control.enter("a2")
    control.rights["a"] = Rights(max_requests_in_flight=1)
    with pytest.raises(Overloaded):
        control.enter("a3")


def test_in_a_full_gate_the_newest_of_whoever_has_most_makes_room(gates: list[_Gate]) -> None:
    control = _with(gates, max_requests=4)
    for number in range(4):
        control.enter(f"a{number}")
    control.enter("b0")
    control.enter("b1")
    assert control.shed == ["a3", "a2"]
    with pytest.raises(Overloaded):
        control.enter("b2")


def test_shares_of_a_full_gate_follow_the_weights(gates: list[_Gate]) -> None:
    control = _with(gates, max_requests=4, b=Rights(weight=3))
    for number in range(4):
        control.enter(f"a{number}")
    for number in range(3):
        control.enter(f"b{number}")
    assert control.shed == ["a3", "a2", "a1"]
    with pytest.raises(Overloaded):
        control.enter("b3")


def test_tokens_count_as_much_as_requests_do(gates: list[_Gate]) -> None:
    control = _with(gates, max_requests=100, max_tokens=100)
    control.enter("a0", 60)
    control.enter("a1", 40)
    control.enter("b0", 30)
    assert control.shed == ["a1"]


def test_a_full_gate_is_no_reason_to_refuse_whoever_has_less_than_another(gates: list[_Gate]) -> None:
    control = _with(gates, max_requests=4)
    for number in range(4):
        control.enter(f"a{number}")
    with pytest.raises(Overloaded):
        control.control.check_room(None, "a")
    control.control.check_room(None, "b")


async def test_a_request_that_is_shed_as_its_turn_comes_gives_it_back(gates: list[_Gate]) -> None:
    control = _with(gates, max_requests=100)
    running = asyncio.Event()
    ends = asyncio.Event()

    async def work(name: str) -> None:
        admission = control.enter(name)
        async with admission.turn(_MODEL):
            running.set()
            await ends.wait()

    task = asyncio.create_task(work("a0"))
    await running.wait()
    await cancelled(task)
    turns = control.tenants._turns[_MODEL]
    assert turns._running == 0
    assert turns._running_tokens == 0


def test_a_priority_above_the_tenants_becomes_its_highest() -> None:
    control = _Gate(a=Rights(highest_priority="bulk"))
    assert control.tenants.restrict(Call(caller=Caller("x", "a"))).is_bulk
    assert not control.tenants.restrict(Call(caller=Caller("x", "b"))).is_bulk


def test_a_table_holds_what_a_caller_may_use() -> None:
    table = ModelTable({("m", 1): 1, ("m", 2): 2, ("n", 1): 3})
    control = _Gate(a=Rights(models=frozenset({"m", "unknown"})), b=NOTHING)
    assert list(control.tenants.table_of(Caller("x", "a"), table)) == [1, 2]
    assert list(control.tenants.table_of(Caller("x", "b"), table)) == []
    assert control.tenants.table_of(Caller("x", "c"), table) is table
    assert control.tenants.table_of(ANONYMOUS, table) is table


def _run(control: _Gate, admission: Admission) -> None:
    """Runs a request to its end."""

    async def run() -> None:
        async with admission.turn(_MODEL):
            pass

    asyncio.run(run())
    control.leave(admission)
