import os
import pty
import signal
import sys
import threading

import pytest

from flatpeak.errors import StoppedError
from flatpeak.runs.signals import StopSignals, signal_name


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 128 + signal.SIGUSR1)]
)
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


@pytest.mark.parametrize("then", [None, ValueError])
def test_a_user_function_that_catches_the_interruption_is_interrupted_all_the_same(then):
    with StopSignals() as stop, pytest.raises(StoppedError), stop.at_once():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception as error:
            if then:
                raise then from error


def test_an_error_of_a_user_function_passes_without_a_signal():
    with StopSignals() as stop, pytest.raises(ValueError, match="mine"), stop.at_once():
        raise ValueError("mine")


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


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_lost_terminal_is_a_request_to_stop_and_printing_goes_on_without_it(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from flatpeak.runs.signals import StopSignals\n"
        "with StopSignals() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while stop.signal is None: time.sleep(0.01)\n"
        "    print('x' * 100_000, flush=True); print('x', file=sys.stderr, flush=True)\n"
        "    Path(sys.argv[1]).write_text(str(stop.exit_code))\n"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", code, str(tmp_path / "saved")])
    assert os.read(terminal, 5) == b"ready"
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "saved").read_text() == str(128 + signal.SIGHUP)


@pytest.mark.parametrize(("number", "name"), [(2, "Ctrl-C"), (15, "SIGTERM"), (1, "SIGHUP"), (999, "signal 999")])
def test_signals_are_named_in_words(number, name):
    assert signal_name(number) == name


def test_a_terminal_shows_at_once_that_the_run_stops():
    code = (
        "import time; from flatpeak.runs.signals import StopSignals\n"
        "with StopSignals() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while stop.signal is None: time.sleep(0.01)\n"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    assert os.read(terminal, 5) == b"ready"
    os.kill(child, signal.SIGINT)
    shown = b""
    while b"without one" not in shown:
        shown += os.read(terminal, 1000)
    assert b"stopping, with a checkpoint of the last step" in shown
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(terminal)
