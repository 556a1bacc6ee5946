"""Which format a check chooses, and which lie on the front."""

import pytest

from kvfolio.engine.candidate import StoredSize
from kvfolio.engine.checked import Check, Row
from kvfolio.engine.quality import Quality

NOISE = Quality(10.0, 10.0, 1e-12, 1e-11, 1.0, 100)


def row(name: str, bits: float, kld: float | None) -> Row:
    quality = None if kld is None else Quality(10.0, 10.0, kld, kld, 1.0, 100)
    return Row(name, name, StoredSize(1, bits, 1, 16), quality, None, None, None, None if kld is not None else "broken")


def made(max_kld: float, *rows: Row) -> Check:
    return Check("model", "bf16", 500, 128, 512, 320, max_kld, None, row("f32", 32.0, None), NOISE, rows)


ROWS = (
    row("bf16", 16.0, 1e-5),
    row("int8", 8.5, 1e-3),
    row("fp8", 8.5, 2e-3),
    row("int4", 4.5, 2e-2),
    row("k8v4", 6.5, 3e-2),
    row("broken", 2.0, None),
)


@pytest.mark.parametrize(
    ("max_kld", "name"), [(1.0, "int4"), (2e-2, "int4"), (0.01, "int8"), (1e-4, "bf16"), (1e-6, None)]
)
def test_the_smallest_within_the_limit_is_chosen_and_of_equals_the_closer(max_kld: float, name: str | None) -> None:
    chosen = made(max_kld, *ROWS).chosen
    assert (None if chosen is None else chosen.name) == name


def test_the_front_has_those_that_nothing_beats_in_both() -> None:
    assert made(0.01, *ROWS).front == ("bf16", "int8", "int4")
    twins = (row("a", 8.0, 1e-3), row("b", 8.0, 1e-3))
    assert made(0.01, *twins).front == ("a", "b")
    assert made(0.01, row("broken", 2.0, None)).front == ()
