"""Pictures for light and dark pages, and for screen readers."""

import re
from html import escape
from pathlib import Path
from typing import Any

# Inverts lightness and keeps hues: white boxes become dark, and lines keep their colours.
_STYLE = "<style>@media(prefers-color-scheme:dark){svg{filter:invert(.92) hue-rotate(180deg)}}</style>"


def with_dark_colours(svg: str) -> str:
    """Returns a picture on a white ground, whose colours follow the reader's colour scheme. Once is enough."""
    return svg if _STYLE in svg else re.sub(r"<svg[^>]*>", lambda root: f"{root[0]}\n{_STYLE}", svg, count=1)


def new_plot() -> tuple[Any, Any]:
    """Returns the figure and the axes of a new plot."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "neuronpipe", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    plot: tuple[Any, Any] = pyplot.subplots(figsize=(8, 3))
    return plot


def save_plot(figure: Any, axes: Any, path: Path, title: str) -> None:
    """Saves and closes a plot. Screen readers read it as an image with the title."""
    from matplotlib import pyplot

    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    head = f' role="img">\n<title>{escape(title)}</title>'
    titled = re.sub(r"(<svg[^>]*)>", lambda root: root[1] + head, path.read_text(), count=1)
    path.write_text(with_dark_colours(titled))
    pyplot.close(figure)
