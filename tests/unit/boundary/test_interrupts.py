import contextlib
import faulthandler
import os
import signal

import pytest

from multitask_rl.boundary.interrupts import (
    Terminated,
    answer_with,
    between_stages,
    check_interrupt,
    finishing,
    interruptible,
    noting_signals,
    stopping_on_signals,
)


@pytest.fixture(autouse=True)
def nothing_ignored():
    """As in a terminal: a shell ignores some of them for what it runs in the background."""
    before = {
        number: signal.signal(number, handler)
        for number, handler in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGHUP, signal.SIG_DFL),
        )
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def update(done, *numbers):
    with finishing():
        for number in numbers:
            os.kill(os.getpid(), number)
        done.append("the update")


def test_what_must_be_finished_is_and_then_the_signal_counts():
    done = []
    with stopping_on_signals():
        update(done, signal.SIGHUP)
        with pytest.raises(Terminated) as ended:
            check_interrupt()
        check_interrupt()  # told once
    assert done == ["the update"]
    assert ended.value.exit_code == 128 + signal.SIGHUP


def test_a_signal_that_found_nothing_left_to_stop_does_not_stop_the_next_run():
    with stopping_on_signals():
        update([], signal.SIGTERM)
    check_interrupt()


def test_what_is_finished_inside_of_something_else_does_not_end_that():
    done = []
    with stopping_on_signals():
        with finishing():
            update(done, signal.SIGTERM)
            check_interrupt()
            done.append("what it is part of")
        with pytest.raises(Terminated):
            check_interrupt()
    assert done == ["the update", "what it is part of"]


def test_between_stages_a_signal_waits_for_the_next_stage_and_a_second_one_for_nothing():
    done = []

    def run():
        with interruptible():
            done.append("a stage")
        os.kill(os.getpid(), signal.SIGTERM)
        check_interrupt()
        done.append("what lies between")
        try:
            with interruptible():
                done.append("the next stage")
        except Terminated:
            done.append("saving")
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("saved")

    with stopping_on_signals(), between_stages(), pytest.raises(Terminated):
        run()
    assert done == ["a stage", "what lies between", "saving"]


def test_a_block_inside_of_another_one_changes_nothing():
    """As the trainer's inside of the command's."""
    with stopping_on_signals():
        handler = signal.getsignal(signal.SIGTERM)
        with stopping_on_signals():
            update([], signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is handler
        with pytest.raises(Terminated):
            check_interrupt()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_library_that_hides_the_signal_does_not_hide_its_number():
    """Ray's waits answer the exception of a handler with a plain KeyboardInterrupt."""

    def wait():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    with pytest.raises(Terminated) as ended, stopping_on_signals():
        wait()
    assert ended.value.exit_code == 128 + signal.SIGTERM
    with pytest.raises(KeyboardInterrupt) as own, stopping_on_signals():
        raise KeyboardInterrupt  # no signal came: it is the script's own
    assert not isinstance(own.value, Terminated)


def test_a_signal_that_foreign_code_swallows_ends_the_run_where_the_next_stage_begins():
    """As a reward in the trainer's process with a bare ``except``."""

    def run():
        with interruptible(), contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        with interruptible():
            pytest.fail("the run goes on")

    with pytest.raises(Terminated) as ended, stopping_on_signals(), between_stages():
        run()
    assert ended.value.exit_code == 128 + signal.SIGTERM
    with interruptible():
        """The next run begins."""


def test_a_signal_is_answered_at_once(capfd):
    with stopping_on_signals(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == "\nstopping; once more ends at once\n"
    with stopping_on_signals():
        answer_with(lambda text: False)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == "\nstopping: what was learned is saved first; once more ends at once\n"
    with stopping_on_signals():
        update([], signal.SIGINT)
        told = capfd.readouterr().err  # ``bench`` saves nothing
        assert told == "\nstopping: the update in progress is finished first; once more ends at once\n"
        with pytest.raises(KeyboardInterrupt):
            check_interrupt()
        answer_with(lambda text: False)
        update([], signal.SIGINT)
        assert "the update in progress is finished and saved first" in capfd.readouterr().err


def test_an_answer_that_no_one_can_read_stops_no_update():
    """Ctrl-C ends ``tee``, too, in ``train 2>&1 | tee log``."""
    read, write = os.pipe()
    os.close(read)
    kept, done = os.dup(2), []
    os.dup2(write, 2)
    os.close(write)
    try:
        with stopping_on_signals():
            update(done, signal.SIGINT)
            with pytest.raises(Terminated):
                check_interrupt()
            with pytest.raises(Terminated):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert done == ["the update"]


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_view_that_would_draw_over_the_answer_shows_it(capfd, is_seen):
    shown = []
    with stopping_on_signals():
        answer_with(lambda text: bool(shown.append(text)) or is_seen)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert shown == ["stopping: what was learned is saved first; once more ends at once"]
    assert bool(capfd.readouterr().err) is not is_seen


def test_a_second_signal_does_not_wait(capfd):
    done = []
    with stopping_on_signals(), pytest.raises(KeyboardInterrupt):
        update(done, signal.SIGINT, signal.SIGINT)
    assert not done
    assert capfd.readouterr().err.count("stopping") == 1, "nothing is saved after it"


def test_signals_that_are_ignored_stay_so_and_handlers_are_put_back():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    own = signal.getsignal(signal.SIGINT)
    try:
        with stopping_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGINT) is own


def test_a_handler_of_the_user_for_sigusr1_stays():
    """``submitit`` and scripts of clusters have their own, unlike for the signals of a terminal."""
    heard = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with stopping_on_signals():
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert heard == [signal.SIGUSR1] * 2


def test_signals_are_only_noted_where_another_process_ends_this_one():
    with noting_signals() as came:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
    assert came == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_faulthandler_keeps_sigusr1(tmp_path):
    """Python does not know of its handler: ``getsignal`` says ``SIG_DFL``."""
    with (tmp_path / "dump").open("w") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=False)
        try:
            for _ in range(2):
                with contextlib.suppress(KeyboardInterrupt), stopping_on_signals():
                    os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert (tmp_path / "dump").read_text().count("most recent call first") == 2
