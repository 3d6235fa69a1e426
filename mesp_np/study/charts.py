"""What the study's figures share: colors, and an SVG made of what draws on a Matplotlib figure."""

import io
import re

from mesp_np.errors import UserError

METHODS = {"store": "#444444", "store-lean": "#8a8a8a", "mebp": "#1b4965", "mesp-store-h": "#5fa8d3", "mesp": "#2a9d8f",
           "mesp-lean": "#c1440e", "mezo": "#b08900"}
PARTS = {"trainables": "#1b4965", "gradients": "#5fa8d3", "optimizer": "#9fc6e0", "checkpoints": "#e0a458",
         "block": "#c1440e", "loss": "#7a5195"}
INSTALL = "pip install 'mesp-np[plot]'"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "mesp_np", "font.size": 9, "font.family": "sans-serif",
         "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "legend.frameon": False}


def svg(draw, size=(7.2, 3.6)):
    """The SVG element that `draw(figure)` makes, the same bytes each time.  Raises UserError without Matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("Matplotlib is not installed, which draws the figures", INSTALL) from None
    with rc_context(STYLE):
        figure, out = Figure(figsize=size, layout="constrained"), io.StringIO()
        draw(figure)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    element = out.getvalue()[out.getvalue().index("<svg"):]
    return re.sub(r'<svg( [^>]*?)? width="[^"]*" height="[^"]*"', r'<svg role="img"\1', element, count=1)
