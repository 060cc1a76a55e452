"""Pictures for light and dark pages, and for screen readers."""

import re
from html import escape

# Inverts lightness and keeps hues: white boxes become dark, and lines keep their colours.
_STYLE = "<style>@media(prefers-color-scheme:dark){svg{filter:invert(.92) hue-rotate(180deg)}}</style>"


def with_title(svg: str, title: str) -> str:
    """Returns a picture with a title, which screen readers read as an image of this name."""
    head = f' role="img">\n<title>{escape(title)}</title>'
    return re.sub(r"(<svg[^>]*)>", lambda root: root[1] + head, svg, count=1)


def with_dark_colours(svg: str) -> str:
    """Returns a picture on a white ground, whose colours follow the reader's colour scheme. Once is enough."""
    return svg if _STYLE in svg else re.sub(r"<svg[^>]*>", lambda root: f"{root[0]}\n{_STYLE}", svg, count=1)
