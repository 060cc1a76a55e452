"""cli/terminal.py: signals end a command, which cleans up first."""

import asyncio
import signal

import pytest

from neuronpipe.cli.terminal import ended_by_signals, ending_on_sigterm


@pytest.mark.parametrize(
    ("first", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)], ids=["SIGTERM", "Ctrl-C"]
)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=["then SIGTERM", "then Ctrl-C"])
def test_a_second_signal_leaves_the_clean_up_alone(
    first: signal.Signals, raised: type[BaseException], second: signal.Signals
) -> None:
    with ending_on_sigterm():
        with pytest.raises(raised):
            signal.raise_signal(first)
        signal.raise_signal(second)


@pytest.mark.parametrize(
    ("third", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_third_signal_ends_a_clean_up_that_hangs(third: signal.Signals, raised: type[BaseException]) -> None:
    with ending_on_sigterm():
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(raised):
            signal.raise_signal(third)


@pytest.mark.parametrize(
    ("first", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)], ids=["SIGTERM", "Ctrl-C"]
)
def test_signals_cancel_work_on_event_loops_which_clean_up(first: signal.Signals, raised: type[BaseException]) -> None:
    events: list[str] = []

    async def work() -> None:
        # As in a callback that loses what is raised there.
        asyncio.get_running_loop().call_soon(signal.raise_signal, first)
        try:
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0)
            events.append("clean")

    with asyncio.Runner() as runner, pytest.raises(raised):
        runner.run(ended_by_signals(work()))
    assert events == ["clean"]


def test_work_that_is_cancelled_without_a_signal_stays_cancelled() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with asyncio.Runner() as runner, pytest.raises(asyncio.CancelledError):
        runner.run(ended_by_signals(work()))


def test_the_handlers_are_as_before_after_the_block() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with ending_on_sigterm():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_on_sigterm():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
