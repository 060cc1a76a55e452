"""gateway/tenant_turns.py: whose request runs next, and how many run."""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from neuronpipe.gateway.tenant_turns import TenantTurns, Turn
from tests.suite.waiting import cancelled

_WINDOW_S = 0.1


class _Model:
    """Requests of a model, which run until they are told to end. The clock is the test's."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.turns = TenantTurns(_WINDOW_S, lambda: self.now_s)
        self.running: list[str] = []  # in the order in which they began
        self._taken: dict[str, Turn] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, tenant: str, tokens: int = 1, *, weight: float = 1.0, is_bulk: bool = False) -> None:
        turn = Turn(self.turns, tenant, weight, tokens, is_bulk=is_bulk)

        async def wait() -> None:
            await self.turns.take(turn)
            self.running.append(name)
            self._taken[name] = turn

        self._tasks[name] = asyncio.create_task(wait())
        await _settle()

    async def end(self, name: str, *, after_s: float = 0.0) -> None:
        """Answered after so long, or else failed at once, which changes no rate."""
        self.now_s += after_s
        self.running.remove(name)
        self.turns.give_back(self._taken.pop(name), is_answered=after_s > 0)
        await _settle()

    def beyond_share(self) -> list[str]:
        return [name for name in self.running if self._taken[name].is_beyond_share]

    def generate(self, name: str, tokens: int) -> None:
        self.turns.charge(self._taken[name], tokens)

    def pause(self, name: str, *, is_paused: bool) -> None:
        self.turns.pause(self._taken[name], is_paused=is_paused)

    def queue(self, name: str) -> None:
        self.turns.queue(self._taken[name])

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await _settle()

    async def learn(self, tokens_per_s: float) -> None:
        """A request runs for a second and is answered, so that the rate is known."""
        await self.ask("known", "nobody", round(tokens_per_s))
        await self.end("known", after_s=1)

    async def close(self) -> None:
        await cancelled(*self._tasks.values())


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def model() -> AsyncIterator[_Model]:
    model = _Model()
    yield model
    await model.close()


async def test_everything_runs_until_the_first_answer(model: _Model) -> None:
    for number in range(100):
        await model.ask(str(number), "a", 1000)
    assert len(model.running) == 100
    assert model.turns.window_tokens == math.inf


async def test_the_window_is_what_is_answered_in_its_time(model: _Model) -> None:
    await model.learn(1000)
    # The quickest answer took a second, and three of those are more than the window of 0.1 s: 3 s at 1,000 a second.
    assert model.turns.window_tokens == pytest.approx(3000)


async def test_the_window_of_a_quick_model_is_its_setting(model: _Model) -> None:
    await model.ask("quick", "a", 10)
    await model.end("quick", after_s=0.01)  # a thousand a second
    assert model.turns.window_tokens == pytest.approx(100)


async def test_time_in_which_nothing_runs_says_nothing_of_the_rate(model: _Model) -> None:
    await model.ask("quick", "a", 10)
    await model.end("quick", after_s=0.01)
    model.now_s += 3600
    assert model.turns.window_tokens == pytest.approx(100)


async def test_a_model_that_has_little_to_do_keeps_the_window_of_its_best_rate(model: _Model) -> None:
    await model.ask("quick", "a", 10)
    await model.end("quick", after_s=0.01)
    for _ in range(20):
        await model.ask("slow", "a", 1)
        await model.end("slow", after_s=0.1)  # ten a second, in two seconds
    assert model.turns.window_tokens == pytest.approx(100, rel=0.05)


async def test_a_model_that_became_slower_gets_a_smaller_window_in_time(model: _Model) -> None:
    await model.ask("quick", "a", 10)
    await model.end("quick", after_s=0.01)
    for _ in range(600):
        await model.ask("slow", "a", 10)
        await model.end("slow", after_s=1)
    assert model.turns.window_tokens < 2


async def test_what_failed_says_nothing_of_the_rate(model: _Model) -> None:
    await model.ask("good", "a", 10)
    await model.end("good", after_s=0.01)
    await model.ask("bad", "a", 10_000)
    await model.end("bad")
    assert model.turns.window_tokens == pytest.approx(100)


async def _fill(model: _Model, count: int = 20) -> None:
    """A window of 85 tokens, and requests of 20 tokens, of which five run."""
    await model.ask("quick", "a", 17)
    await model.end("quick", after_s=0.02)
    for number in range(count):
        await model.ask(f"flood{number}", "flood", 20)


async def test_beyond_the_window_requests_wait_in_order(model: _Model) -> None:
    await _fill(model)
    assert model.running == [f"flood{number}" for number in range(5)]
    await model.end("flood0")
    assert model.running[-1] == "flood5"


async def test_a_tenant_below_its_share_does_not_wait(model: _Model) -> None:
    await _fill(model)
    await model.ask("first", "quiet", 20)
    await model.ask("second", "quiet", 20)
    assert {"first", "second"} <= set(model.running)


async def test_a_tenant_that_borrowed_gets_no_more_while_another_is_below_its_share(model: _Model) -> None:
    await _fill(model)
    for number in range(6):
        await model.ask(f"quiet{number}", "quiet", 20)
    # Beside the five of the flood, until two windows are full: 170 tokens.
    assert [name for name in model.running if name.startswith("quiet")] == ["quiet0", "quiet1", "quiet2", "quiet3"]
    await model.end("flood0")
    assert model.running[-1] == "quiet4"


async def test_a_tenant_alone_is_within_its_share(model: _Model) -> None:
    await model.ask("first", "alone", 20)
    await model.ask("second", "alone", 20)
    assert model.beyond_share() == []


async def test_a_request_is_beyond_its_tenants_share_where_that_ran_more_than_others(model: _Model) -> None:
    for name, tenant in {"a1": "a", "b1": "b", "a2": "a", "a3": "a", "b2": "b"}.items():
        await model.ask(name, tenant, 20)
    assert model.beyond_share() == ["a3"]


async def test_two_floods_share_evenly(model: _Model) -> None:
    await _fill(model)
    for number in range(20):
        await model.ask(f"other{number}", "other", 20)
    began: list[str] = []
    for _ in range(20):
        before = set(model.running)
        await model.end(model.running[0])
        began += [name for name in model.running if name not in before]
    # Half each; the one that came first had filled the window, so the other begins with one or two more.
    ours = sum(name.startswith("other") for name in began)
    assert 8 <= ours <= 12


async def test_shares_follow_the_weights(model: _Model) -> None:
    await model.ask("quick", "a", 10)
    await model.end("quick", after_s=0.01)
    for number in range(60):
        await model.ask(f"light{number}", "light", 10, weight=1)
        await model.ask(f"heavy{number}", "heavy", 10, weight=3)
    began = len(model.running)
    light = sum(name.startswith("light") for name in model.running)
    for _ in range(40):
        ended = model.running[0]
        await model.end(ended)
        light += model.running[-1].startswith("light")
        began += 1
    # Of fifty requests a quarter, give or take what began before the other had asked.
    assert light == pytest.approx(began / 4, abs=3)


@pytest.mark.parametrize(("later_s", "first"), [(0, "other"), (60, "flood")])
async def test_what_a_tenant_ran_is_forgotten_in_time(model: _Model, later_s: float, first: str) -> None:
    await _fill(model, count=5)
    for number in range(5):
        await model.end(f"flood{number}")
    model.now_s += later_s
    for number in range(5):  # fills the window
        await model.ask(f"third{number}", "third", 20)
    for number in range(5):  # up to its share runs beside
        await model.ask(f"more{number}", "flood", 20)
        await model.ask(f"other{number}", "other", 20)
    model.running.clear()
    for number in range(5):
        model.running.append(f"third{number}")
        await model.end(f"third{number}")
        if model.running:
            break
    assert model.running[0].startswith({"flood": "more", "other": "other"}[first])


async def test_a_tenant_whose_requests_generate_much_is_beyond_its_share(model: _Model) -> None:
    await model.ask("a1", "a", 1)
    await model.ask("b1", "b", 100)
    model.generate("a1", 4096)
    await model.ask("a2", "a", 1)
    await model.ask("b2", "b", 100)
    assert model.beyond_share() == ["a2"]


async def test_long_texts_of_one_tenant_do_not_fill_the_window(model: _Model) -> None:
    await _fill(model, count=1)
    model.generate("flood0", 100_000)
    await model.ask("quiet", "quiet", 20)
    assert "quiet" in model.running


async def test_bulk_waits_for_interactive_requests(model: _Model) -> None:
    await _fill(model, count=6)
    await model.ask("bulk", "quiet", 20, is_bulk=True)
    assert "bulk" not in model.running
    await model.end("flood0")
    assert model.running[-1] == "flood5"
    await model.end("flood1")
    assert model.running[-1] == "bulk"


async def test_a_request_larger_than_the_window_runs(model: _Model) -> None:
    await _fill(model, count=6)
    await model.ask("huge", "quiet", 5000)
    assert "huge" in model.running


async def test_whoever_leaves_the_queue_is_not_in_the_way(model: _Model) -> None:
    await _fill(model)
    await model.leave("flood5")
    await model.end("flood0")
    assert model.running[-1] == "flood6"


async def test_whoever_leaves_as_its_turn_comes_gives_it_back(model: _Model) -> None:
    await _fill(model)
    model.running.remove("flood0")
    model.turns.give_back(model._taken.pop("flood0"), is_answered=False)
    model._tasks["flood5"].cancel()  # it has its turn, and does not know yet
    await _settle()
    assert "flood5" not in model.running
    assert model.running[-1] == "flood6"


async def test_a_stuck_model_lets_two_requests_run(model: _Model) -> None:
    await _fill(model)
    model.now_s += 3600  # nothing was answered for an hour in which something ran
    for number in range(4):
        await model.end(f"flood{number}")
    assert len(model.running) == 2


async def test_a_request_that_waits_for_its_grammar_holds_no_turn(model: _Model) -> None:
    await model.learn(100)  # 300 at once
    for number in range(9):
        await model.ask(f"m{number}", "mallory", 300)
        if f"m{number}" in model.running:
            model.pause(f"m{number}", is_paused=True)
            model.pause(f"m{number}", is_paused=True)
    await model.ask("a1", "a", 300)
    await model.ask("a2", "a", 300)
    assert len(model.running) == 11
    await model.ask("a3", "a", 300)
    assert "a3" not in model.running
    model.pause("m0", is_paused=False)
    await model.end("m1")  # one that never ran again
    await model.end("a1")
    assert "a3" not in model.running, "what goes on counts again"
    await model.end("m0")
    assert "a3" in model.running


async def test_the_time_of_a_request_that_is_paused_counts_for_the_window(model: _Model) -> None:
    """Or texts that have begun, which are answered as fast as before, would make it larger and larger."""
    await model.learn(100)  # 300 at once
    for number in range(20):
        await model.ask(f"m{number}", "mallory", 100)
        model.pause(f"m{number}", is_paused=True)
        await model.end(f"m{number}", after_s=1)
    assert model.turns.window_tokens == pytest.approx(300)


async def _ask_texts(model: _Model, tenant: str, count: int) -> list[str]:
    """Asks for texts of 100 tokens. Returns those that run, and wait in the executor."""
    for number in range(count):
        await model.ask(f"{tenant}{number}", tenant, 100)
        for name in [name for name in model.running if not model._taken[name].is_queued]:
            model.queue(name)
            await _settle()
    return [name for name in model.running if name.startswith(tenant)]


async def test_texts_that_wait_in_the_executor_are_in_the_way_of_their_tenant_only(model: _Model) -> None:
    await model.learn(1000)  # 3000 at once
    assert len(await _ask_texts(model, "mallory", 100)) == 30
    assert len(await _ask_texts(model, "quiet", 5)) == 5


async def test_a_tenant_that_used_more_does_not_wait_for_one_whose_texts_fill_the_executor(model: _Model) -> None:
    await model.learn(1000)
    await model.ask("before", "quiet", 100)
    model.generate("before", 100_000)
    await model.end("before")
    assert len(await _ask_texts(model, "mallory", 100)) == 30
    assert len(await _ask_texts(model, "quiet", 5)) == 5


async def test_a_slow_model_has_sixteen_texts_of_a_tenant_that_wait(model: _Model) -> None:
    await model.learn(1)
    assert len(await _ask_texts(model, "mallory", 40)) == 16


async def test_the_next_text_runs_when_one_has_its_first_token_or_ends(model: _Model) -> None:
    await model.learn(1)
    await _ask_texts(model, "mallory", 40)
    model.pause("mallory3", is_paused=True)
    await _settle()
    assert model.running[16:] == ["mallory16", "mallory17"]  # two may be on their way to the executor
    model.queue("mallory16")
    model.queue("mallory17")
    await model.end("mallory3")  # it held no place
    await model.end("mallory0")
    assert len(model.running) == 16
    await model.end("mallory1")
    assert model.running[15:] == ["mallory18", "mallory19"]
