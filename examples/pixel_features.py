"""A feature network that needs no download: each image as a 4 x 4 thumbnail, 48 numbers in [0, 1].

    curlfree evaluate RUN --features pixel_features:thumbnails     (with this folder on PYTHONPATH)

Distances in it compare coarse colours and layout, nothing else: good for a test of the machinery.
"""

import torch.nn.functional as F
from torch import Tensor


def thumbnails(images: Tensor) -> Tensor:
    """Features (B, 48) of images, uint8 (B, C, H, W)."""
    return F.adaptive_avg_pool2d(images.float() / 255, 4).flatten(1)
