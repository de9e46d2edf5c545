"""The error tree: survives pickling, keeps its exit codes."""

import pickle

import pytest

from multitask_rl import errors
from multitask_rl.errors import MultitaskRLError
from multitask_rl.scoring.results import failure_of

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, MultitaskRLError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_error_survives_a_process_boundary(cls: type[MultitaskRLError]) -> None:
    again = pickle.loads(pickle.dumps(cls("what, where, what to do")))
    assert type(again) is cls
    assert str(again) == "what, where, what to do"


@pytest.mark.parametrize("cls", CLASSES)
def test_error_belongs_to_the_tree_and_has_an_exit_code(cls: type[MultitaskRLError]) -> None:
    assert issubclass(cls, MultitaskRLError)
    assert cls.exit_code in (1, 2, 3)


def test_exit_codes_are_those_of_the_command_line() -> None:
    codes = {cls.__name__: cls.exit_code for cls in CLASSES}
    assert codes["GuardStop"] == 3
    assert {codes[n] for n in ("ConfigError", "PluginError", "DataError", "MissingExtraError")} == {2}
    assert codes["TrainingError"] == 1


def test_errors_can_be_caught_as_their_builtin_kind() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.PluginError, LookupError)
    assert issubclass(errors.MissingExtraError, ImportError)


class Mute(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_an_error_whose_text_raises_is_told_by_its_type() -> None:
    error = Mute()
    error.add_note("in the stage 'mine'")
    assert errors.with_notes(error) == "Mute: (its __str__ raises ZeroDivisionError), in the stage 'mine'"
    assert failure_of(error, "score").message == "raised Mute: (its __str__ raises ZeroDivisionError)"
