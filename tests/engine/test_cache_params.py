"""What a request may ask of the prefix cache, and what its retention means in tokens.

Knows nothing of how a block is kept.
"""

import dataclasses
import math

import pytest

from kvfolio.cache.index import DEFAULT_PRIORITY, PIN
from kvfolio.cache.retention import KeepRange
from kvfolio.engine.params import CacheParams, Retention
from kvfolio.errors import OptionError

REFUSED_OF_A_REQUEST = {
    "namespace": [1, b"a", ["a"], True],
    "reuse": [None, 0, 1, "yes"],
    "retention": [None, 5, "long", [50], [Retention(), None], {"priority": 5}],
}
REFUSED_OF_RETENTION = {
    "priority": [-1, 101, 1.0, True, None, "50", math.nan],
    "ttl_s": [0, 0.0, -1, math.nan, math.inf, True, "5"],
    "part": ["", "answer", None, 0, True],
    "start": [-1, 1.0, None, True, "0"],
    "stop": [-1, 1.5, True, "3"],
    "pin": [None, 0, 1, "yes"],
}


@pytest.mark.parametrize(
    ("field", "given"), [(field, given) for field, row in REFUSED_OF_A_REQUEST.items() for given in row]
)
def test_what_a_request_cannot_mean_is_refused_by_the_name_of_its_field(field: str, given: object) -> None:
    with pytest.raises(OptionError, match=rf"^{field} is .*accepted: "):
        CacheParams(**{field: given})


@pytest.mark.parametrize(
    ("field", "given"), [(field, given) for field, row in REFUSED_OF_RETENTION.items() for given in row]
)
def test_what_a_retention_cannot_mean_is_refused_by_the_name_of_its_field(field: str, given: object) -> None:
    with pytest.raises(OptionError, match=rf"^{field} is .*accepted: "):
        Retention(**{field: given})


def test_every_field_has_values_that_are_refused() -> None:
    assert set(REFUSED_OF_A_REQUEST) == {field.name for field in dataclasses.fields(CacheParams)}
    assert set(REFUSED_OF_RETENTION) == {field.name for field in dataclasses.fields(Retention)}


def test_a_stop_before_the_start_is_refused() -> None:
    assert Retention(start=5, stop=5).stop == 5
    with pytest.raises(OptionError, match=r"^stop is 4.*at least start"):
        Retention(start=5, stop=4)


def test_nothing_asked_is_the_common_namespace_with_reuse_and_no_retention() -> None:
    params = CacheParams()
    assert (params.namespace, params.reuse, params.retention) == (None, True, ())
    assert params.ranges(10) == ()


@pytest.mark.parametrize("namespace", [None, "", "tenant", "é\0\n", "x" * 1024, "\ud800"])
def test_any_text_is_a_namespace(namespace: str | None) -> None:
    assert CacheParams(namespace).namespace == namespace


def test_a_namespace_is_kept_by_many_and_so_it_is_short() -> None:
    with pytest.raises(OptionError, match="at most 1024 characters"):
        CacheParams("x" * 1025)


def test_one_retention_is_a_list_of_one() -> None:
    one = Retention(60)
    assert CacheParams(retention=one).retention == CacheParams(retention=[one]).retention == (one,)
    assert CacheParams(retention=[one, Retention(1)]).ranges(4) == (KeepRange(60), KeepRange(1))


@pytest.mark.parametrize(
    ("part", "start", "stop", "expected"),
    [  # of a prompt of 10 tokens
        ("all", 0, None, (0, None)),
        ("all", 3, 25, (3, 25)),
        ("prompt", 0, None, (0, 10)),
        ("prompt", 4, None, (4, 10)),
        ("prompt", 4, 8, (4, 8)),
        ("prompt", 4, 99, (4, 10)),
        ("prompt", 40, 99, (10, 10)),
        ("decoded", 0, None, (10, None)),
        ("decoded", 2, None, (12, None)),
        ("decoded", 2, 5, (12, 15)),
    ],
)
def test_a_part_is_a_range_of_the_whole_sequence(
    part: str, start: int, stop: int | None, expected: tuple[int, int | None]
) -> None:
    found = Retention(part=part, start=start, stop=stop).range(10)
    assert (found.start, found.stop) == expected


def test_priority_time_and_pin_are_passed_on() -> None:
    assert Retention().range(1).priority == DEFAULT_PRIORITY
    assert Retention(0, 5.0).range(1) == KeepRange(0, 5.0, 0, None)
    assert Retention(100).range(1).priority == 100 < PIN
    assert Retention(3, pin=True).range(1).priority == PIN
