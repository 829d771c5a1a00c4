"""Networks that are smooth and carry tangents, as the penalty needs them."""

from curlfree.nets.ncsnpp import PRESETS, NCSNpp, NCSNppConfig

__all__ = ["PRESETS", "NCSNpp", "NCSNppConfig"]
