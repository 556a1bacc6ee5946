"""How the numbers of a piece of a network are held and added up, and how a config writes one of them for each layer.

Knows nothing of networks: which pieces there are, and which names they have, is for those who count.
"""

from dataclasses import dataclass

from kvfolio.spec.fields import Fields


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of one piece of a network: in matrices that a quantised checkpoint packs, and in all the rest."""

    matrices: int = 0
    other: int = 0  # norms, biases, convolutions, routers: kept at the dtype of the model

    def __add__(self, more: "Weights") -> "Weights":
        return Weights(self.matrices + more.matrices, self.other + more.other)

    def times(self, count: int) -> "Weights":
        return Weights(self.matrices * count, self.other * count)

    @property
    def total(self) -> int:
        return self.matrices + self.other


NOTHING = Weights()


def per_layer(fields: Fields, names: tuple[str, ...], num_layers: int) -> tuple[int, ...] | None:
    """The whole numbers under the first of ``names`` that is set, one a layer; None where none is set.

    One number stands for every layer; where none is set, the one that the model's class assumes. A list may have more
    entries than layers: those are of layers that guess ahead.
    """
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        items = value if isinstance(value, list) else [value] * num_layers
        if len(items) < num_layers or not all(type(item) is int and 0 <= item <= 2**40 for item in items):
            raise fields.wrong(name, value, f"a whole number, or a list of {num_layers} of them")
        return tuple(items[:num_layers])
    usual = next((name for name in names if type(fields.usual.get(name)) is int), None)
    if usual is None or fields.names(usual):
        return None
    return (fields.integer(usual, low=0),) * num_layers  # noted as assumed
