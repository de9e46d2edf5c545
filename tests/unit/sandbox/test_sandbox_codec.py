"""Values survive the way between processes; nothing else does."""

import array
import collections
import datetime
import math
import tracemalloc
from decimal import Decimal
from fractions import Fraction

import pytest

from multitask_rl.sandbox.cell.codec import MAX_MESSAGE, CodecError, Decoder, Encoder, NeedsArraysError


class Handle:
    def __init__(self, tag, content):
        self.tag, self.content = tag, content


ENCODER = Encoder(lambda value: ("h", type(value).__name__))
DECODER = Decoder(Handle)


def there_and_back(value):
    return DECODER.loads(ENCODER.dumps(ENCODER.encode(value)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(1 << 70),
        1 << 40_000,
        0.1,
        -0.0,
        float("inf"),
        "text \x00 \ud800 ☃",
        b"\x00\xff",
        bytearray(b"ab"),
        array.array("d", [1.5, -2.0]),
        1 - 2j,
        Decimal("1.10"),
        Fraction(1, 3),
        [1, [2, ["x"]]],
        (1, (2,)),
        {1, 2},
        frozenset({"a"}),
        {"a": 1, (1, 2): [3], None: {}},
        collections.deque([1, 2], maxlen=5),
        range(0, 10, 3),
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.timedelta(days=1, seconds=2),
        int,
        ...,
        NotImplemented,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_plain_value_arrives_as_it_was(value):
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back == value
    assert math.copysign(1, back) == math.copysign(1, value) if type(value) is float else True


def test_not_a_number_stays_one():
    assert math.isnan(there_and_back(float("nan")))


def test_a_subclass_arrives_as_the_value_of_its_base():
    class Liar(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

        def __int__(self):
            return 99

    class Text(str):
        def __str__(self):
            return "other"

    class Rows(list):
        def __iter__(self):
            return iter("xy")

    assert [type(v) for v in there_and_back([Liar(7), Text("a"), Rows([1])])] == [int, str, list]
    assert there_and_back([Liar(7), Text("a"), Rows([1])]) == [7, "a", [1]]
    assert there_and_back(collections.Counter("aab")) == {"a": 2, "b": 1}
    assert type(there_and_back(collections.OrderedDict(a=1))) is dict


def test_a_named_tuple_keeps_its_names():
    point = there_and_back(collections.namedtuple("Point", "x y")(1, 2))
    assert (point.x, point.y) == (1, 2)
    assert point == (1, 2)


def test_dictionary_views_arrive_as_views():
    values = {"a": 1, "b": 2}
    assert there_and_back(values.keys()) == values.keys()
    assert list(there_and_back(values.values())) == [1, 2]
    assert there_and_back(values.items()) == values.items()


def test_arrays_arrive_as_arrays():
    numpy = pytest.importorskip("numpy")
    array = there_and_back(numpy.array([[1.5, 2], [3, 4]]))
    assert array.dtype == numpy.float64
    assert array.tolist() == [[1.5, 2.0], [3.0, 4.0]]
    assert type(there_and_back(numpy.int64(3))) is int


def test_anything_else_becomes_a_handle():
    handle = there_and_back([object()])[0]
    assert (handle.tag, handle.content) == ("h", "object")
    assert there_and_back(len).content == "builtin_function_or_method"


def test_a_cycle_and_a_deep_value_are_refused():
    cycle = []
    cycle.append(cycle)
    with pytest.raises(CodecError, match="nested deeper"):
        ENCODER.encode(cycle)


def test_a_value_beyond_the_size_limit_is_refused():
    with pytest.raises(CodecError, match="more than"):
        ENCODER.dumps("x" * (MAX_MESSAGE + 1))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff",
        b'{"a": 1, "b": 2}',
        b"{}",
        b'{"i": "zz"}',
        b'{"F": [1, 0]}',
        b'{"a": ["q", ["x"]]}',
        b'{"a": ["?", []]}',
        b'{"s": [[1]]}',
        b'{"T": "eval"}',
        b'{"d": [[1], []]}',
        b'{"k": ["now", "x"]}',
        b'{"n": ["P", ["x y", "class"], [1]]}',
        b'{"b": "?"}',
        b"[" * 100_000,
    ],
    ids=range(16),
)
def test_text_that_is_no_value_is_refused(text):
    with pytest.raises(CodecError):
        DECODER.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        b'{"t": {"r": [0, 3000000, 1]}}',
        b'{"q": [{"r": [0, 3000000, 1]}, null]}',
        b'{"s": {"r": [0, 3000000, 1]}}',
        b'{"V": {"r": [0, 3000000, 1]}}',
        b'{"d": [{"r": [0, 3000000, 1]}, {"r": [0, 3000000, 1]}]}',
        b'{"a": ["d", {"r": [0, 3000000, 1]}]}',
        b'{"n": ["P", {"r": [0, 3, 1]}, {"r": [0, 3000000, 1]}]}',
        b'{"n": ["P", "' + b"a " * 20_000 + b'", []]}',
        b'{"F": ["1e3000000", 1]}',
        b'{"F": [{"D": "1e3000000"}, 1]}',
        b'{"c": ["1", "2"]}',
        b'{"r": ["0", 3, 1]}',
        b'{"I": ["ab"]}',
        b'{"z": -1}',
        b'{"z": true}',
        b'{"k": ["date", 1]}',
        b'{"l": [1.5, 0, 0]}',
        b'{"N": ["<i8", [9, 9, 0], [1, 2]]}',
        b'{"N": ["<U1", [4001], ["' + b"a" * 4000 + b'"' + b',""' * 4000 + b"]]}",
        b'{"N": ["O", [1], [1]]}',
        b'{"N": ["<i8", [3000000], {"r": [0, 3000000, 1]}]}',
        b'{"T": ["int"]}',
    ],
    ids=lambda text: text[:24].decode(),
)
def test_a_message_builds_no_more_than_it_holds(text):
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            DECODER.loads(text)
        assert tracemalloc.get_traced_memory()[1] < (8 << 20)
    finally:
        tracemalloc.stop()


def test_a_reader_without_arrays_says_that_it_needs_them():
    with pytest.raises(NeedsArraysError):
        Decoder(Handle, has_arrays=False).loads(b'[{"N": ["<i8", [1], [1]]}]')


def test_a_named_tuple_with_too_many_fields_arrives_as_a_tuple():
    wide = collections.namedtuple("Wide", [f"x{i}" for i in range(300)])
    assert there_and_back(wide(*range(300))) == tuple(range(300))
