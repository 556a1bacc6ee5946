"""The plots of the HTML page: plotly's script, and of each plot its words, its height and its axes with their units.

Knows nothing of models or numbers: the page fills traces in as its controls move (``files/plots.js``). plotly is
asked for only when a page is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvfolio.errors import OptionError

_TOKENS = {"title": {"text": "context (tokens)"}, "type": "log"}
_USERS = {"title": {"text": "users decoding at once"}, "type": "log"}


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot before it has numbers. ``layout`` is plotly's; colours and ticks are the page's."""

    key: str
    title: str
    caption: str  # how to read it; {words} in braces are filled in by the page
    height: int  # CSS pixels
    layout: Mapping[str, object]


PLOTS = (
    Plot(
        "growth",
        "Cache against context",
        "Caches of {users} in {format} on {one_device}. Dotted: more than the model can read. Where a line crosses "
        "the dashed one, the caches on a device outweigh the weights of {model} there. Upright: the chosen context.",
        430,
        {"xaxis": _TOKENS, "yaxis": {"title": {"text": "bytes on one device"}, "type": "log"}, "hovermode": "closest"},
    ),
    Plot(
        "memory",
        "Where one device's memory goes",
        "{model}, {users} of {context} tokens each, on {one_device}. The vertical line is the memory of the device.",
        430,
        {
            "xaxis": {"title": {"text": "bytes on one device (GiB)"}, "rangemode": "tozero"},
            "yaxis": {"type": "category", "autorange": "reversed"},
            "barmode": "stack",
            "hovermode": "closest",
        },
    ),
    Plot(
        "fit",
        "Users that fit",
        "Conversations of {model} whose whole context is set aside, on {devices}, by format of the cache.",
        520,
        {"xaxis": _TOKENS, "yaxis": {"title": {"text": "users that fit"}, "type": "log"}, "hovermode": "closest"},
    ),
    Plot(
        "speed",
        "Tokens a second against users",
        "{model} at {context} tokens in {format} on {devices}, at best. Dotted: more users than fit. "
        "The diamond marks where arithmetic, not memory, becomes the limit.",
        520,
        {
            "xaxis": {**_USERS, "anchor": "y2"},
            "yaxis": {"title": {"text": "tokens/s per user"}, "type": "log", "domain": [0.55, 1.0]},
            "yaxis2": {"title": {"text": "tokens/s, all users"}, "type": "log", "domain": [0.0, 0.45]},
            "hovermode": "closest",
        },
    ),
    Plot(
        "step",
        "What one step spends its time on",
        "Reading the weights and reading the caches add up; arithmetic runs beside them and counts where it is longer. "
        "{model} at {context} tokens in {format} on {devices}, for as many users as fit.",
        520,
        {
            "xaxis": {"title": {"text": "users decoding at once"}, "type": "category"},
            "yaxis": {"title": {"text": "time of one step (ms)"}, "rangemode": "tozero"},
            "barmode": "stack",
            "hovermode": "x unified",
        },
    ),
    Plot(
        "ladder",
        "What another design would cost",
        "One conversation of {context} tokens of {model}. Designs are counted in {format}, those that it can hold; "
        "below them the model as published in other formats. How well such a model would answer is not arithmetic.",
        520,
        {
            "xaxis": {"title": {"text": "bytes of one conversation (GiB)"}, "rangemode": "tozero"},
            "yaxis": {"type": "category", "autorange": "reversed"},
            "hovermode": "closest",
        },
    ),
)


def plotly_script() -> str:
    """plotly.js as one text, to be embedded. Raises OptionError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise OptionError(
            "the HTML page needs plotly, which is not installed; run: pip install 'kvfolio[page]'"
        ) from error
    # "</script" in a script's own text would end its element.
    return str(get_plotlyjs()).replace("</script", "<\\/script")
