"""What the study's figures share: colors, and an SVG made of what draws on a Matplotlib figure."""

import re

from mesp_np.plot import picture

METHODS = {"store": "#444444", "store-lean": "#8a8a8a", "mebp": "#1b4965", "mesp-store-h": "#5fa8d3", "mesp": "#2a9d8f",
           "mesp-lean": "#c1440e", "mezo": "#b08900"}
PARTS = {"trainables": "#1b4965", "gradients": "#5fa8d3", "optimizer": "#9fc6e0", "checkpoints": "#e0a458",
         "block": "#c1440e", "loss": "#7a5195"}


def svg(draw, size=(7.2, 3.6)):
    """The SVG element that `draw(figure)` makes, the same bytes each time.  Raises UserError without Matplotlib."""
    text = picture(draw, size, "svg").decode()
    element = text[text.index("<svg"):]
    return re.sub(r'<svg( [^>]*?)? width="[^"]*" height="[^"]*"', r'<svg role="img"\1', element, count=1)
