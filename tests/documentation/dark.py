"""Pictures for light and dark pages alike."""

import re

# Inverts lightness and keeps hues: white boxes become dark, and lines keep their colours.
_STYLE = "<style>@media(prefers-color-scheme:dark){svg{filter:invert(.92) hue-rotate(180deg)}}</style>"


def with_dark_colours(svg: str) -> str:
    """Returns a picture on a white ground, whose colours follow the reader's colour scheme. Once is enough."""
    return svg if _STYLE in svg else re.sub(r"<svg[^>]*>", lambda root: f"{root[0]}\n{_STYLE}", svg, count=1)
