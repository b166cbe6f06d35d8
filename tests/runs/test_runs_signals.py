import os
import signal
import threading

import pytest

from flatpeak.runs.signals import StopSignals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_remembered(number, code):
    with StopSignals() as stop:
        assert stop.signal is None
        assert stop.exit_code == 0
        os.kill(os.getpid(), number)
        assert stop.signal == number
    assert stop.exit_code == code


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_interrupts_at_once(second):
    with StopSignals() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), second)
    assert stop.exit_code == 143


def test_the_handlers_before_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RuntimeError), StopSignals():
        raise RuntimeError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_it_does_nothing():
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def work() -> None:
        with StopSignals() as stop:
            seen.extend([stop.signal, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None, before]
    assert signal.getsignal(signal.SIGTERM) is before
