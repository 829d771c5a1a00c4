r"""Feature metrics: how a set of images differs from the data in the eyes of a network.

A feature network turns uint8 images (B, C, H, W) into features (B, D), or into features and the logits of a
classifier. The canonical one, the Inception of 2015 with TensorFlow's resizing as torch-fidelity has it,
comes with the extra [inception]; any other is given as a file or as ``module:function``. Everything after
the network is in double precision.

* FID, ``||m1 - m2||^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2))`` (Heusel et al. 2017, arXiv:1706.08500). With roots
  ``S = R^T R`` from a QR decomposition of the centred features, the last trace is the sum of the singular
  values of ``R1 R2^T``: exact to rounding for singular covariances too, where the eigenvalues of S1 S2, which
  torchmetrics and SciPy's square root use, lose half the digits. FID is biased upwards by O(1/n).
* IS, ``exp E KL(p(y|x) || p(y))`` (Salimans et al. 2016, arXiv:1606.03498), of all images at once.
* KID, the unbiased squared MMD with the kernel ``(<f, g>/D + 1)^3`` (Binkowski et al. 2018,
  arXiv:1801.01401), averaged over disjoint blocks: independent estimates, so that their scatter gives the
  standard error, which that over overlapping random subsets does not.

IS and KID are torchmetrics'. FID is not: it is the formula above, for the digits that torchmetrics' class
loses where covariances are singular and for its standard error, which that class has not; a test holds it to
both torchmetrics and SciPy. The standard errors of FID and IS are those of the delta method over the
generated images, by each image's influence on the value; the reference counts as given.
"""

import hashlib
import importlib
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from curlfree.metrics import Estimate, mean_estimate

FeatureNetwork = Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]


def load_network(spec: str, device: torch.device | str = "cpu") -> tuple[FeatureNetwork, str]:
    """A feature network and the name that tells it from any other.

    Args:
        spec: "inception"; the path of a TorchScript file, or of a ``.pt2`` file of torch.export; or
            ``module:function``, something importable that takes uint8 images.
        device: where it works.

    Returns:
        The network and its identity, for a file with the file's SHA-256.

    Raises:
        ValueError: there is no such network, or it needs a package that is not there.
    """
    if spec == "inception":
        return _inception(device)
    path = Path(spec)
    if path.is_file():
        identity = f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        kind = "torch.export" if path.suffix == ".pt2" else "TorchScript"
        try:
            if path.suffix == ".pt2":
                return torch.export.load(path).module().to(device), identity
            return torch.jit.load(path, map_location=device).eval(), identity
        except (RuntimeError, ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ValueError(
                f"{path}: expected a {kind} file, found something else or a damaged one ({reason})"
            ) from error
    module, colon, name = spec.partition(":")
    if not colon or path.suffix:
        raise ValueError(
            f"features: expected 'inception', the path of a TorchScript or .pt2 file, or 'module:function', "
            f"found {spec!r}, which is no file"
        )
    try:
        network = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"features: cannot import {spec!r}: {error}") from error
    return (network.to(device).eval() if isinstance(network, nn.Module) else network), spec


def _inception(device: torch.device | str) -> tuple[FeatureNetwork, str]:
    try:
        from torch_fidelity import __version__
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except (ImportError, RuntimeError) as error:  # a torchvision built for another torch is a RuntimeError
        raise ValueError(
            "features: the canonical Inception needs torch-fidelity and a torchvision that fits this torch; "
            f"install them with `pip install 'curlfree[inception]'`, or name another network ({error})"
        ) from error
    name = "inception-v3-compat"
    inception = FeatureExtractorInceptionV3(name, ["2048", "logits_unbiased"]).to(device)

    def network(images: Tensor) -> tuple[Tensor, Tensor]:
        return inception(images.expand(-1, 3, -1, -1))

    return network, f"{name} (torch-fidelity {__version__})"


@torch.no_grad()
def extract(network: FeatureNetwork, images: Tensor) -> dict[str, Tensor]:
    """The features, and the logits if the network has them, of a batch of images, on the CPU.

    Args:
        network: as `load_network` returns it.
        images: uint8, (B, C, H, W), on the network's device.

    Raises:
        TypeError: the images are not uint8.
        ValueError: the features are not of shape (B, D).
    """
    if images.dtype != torch.uint8:
        raise TypeError(f"feature networks take uint8 images, got {images.dtype}; convert with to_uint8")
    out = network(images)
    named = (
        {"features": out} if isinstance(out, Tensor) else dict(zip(("features", "logits"), out, strict=True))
    )
    for name, value in named.items():
        if value.ndim != 2 or len(value) != len(images):
            raise ValueError(
                f"a feature network returns one row per image: expected {name} of shape ({len(images)}, D), "
                f"found {tuple(value.shape)}"
            )
    return {name: value.float().cpu() for name, value in named.items()}


def fid(real: Tensor, fake: Tensor) -> Estimate:
    """The Frechet distance between Gaussians with the features' moments, and its standard error.

    Args:
        real: features of the data, (N, D).
        fake: features of the generated images, (M, D).

    Raises:
        ValueError: shapes do not fit, or fewer than two images.
    """
    real, fake = _checked(real, fake)
    mean1, mean2 = real.mean(0), fake.mean(0)
    R1 = torch.linalg.qr(real - mean1, mode="r").R / (len(real) - 1) ** 0.5
    a = fake - mean2
    n = len(fake)
    Q, R2 = torch.linalg.qr(a)
    R2 = R2 / (n - 1) ** 0.5
    U, overlap, Vh = torch.linalg.svd(R1 @ R2.mT, full_matrices=False)
    shift = mean2 - mean1
    value = shift.square().sum() + R1.square().sum() + R2.square().sum() - 2 * overlap.sum()
    # d tr(S1 S2)^(1/2) = <V U^T R1, dR2>; row i of the features moves S2 = R2^T R2 by (a_i a_i^T - S2)/n.
    cross = (n - 1) ** 0.5 * ((Q @ (Vh.mT @ (U.mT @ R1))) * a).sum(1)
    influence = 2 * a @ shift + a.square().sum(1) - cross
    return Estimate(float(value), mean_estimate(influence).se)


def inception_score(logits: Tensor) -> Estimate:
    """The Inception score of all images at once, without splits, and its standard error.

    Args:
        logits: of a classifier, (M, classes).
    """
    from torchmetrics.image.inception import InceptionScore

    log_p = logits.double().log_softmax(1)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # it shuffles, which changes nothing
        warnings.simplefilter("ignore", UserWarning)  # on memory, and on the scatter of one split
        metric = InceptionScore(feature=nn.Identity(), splits=1)
        metric.update(log_p)
        value = float(metric.compute()[0])
    divergence = (log_p.exp() * (log_p - log_p.logsumexp(0))).sum(1)  # up to a constant
    return Estimate(value, value * mean_estimate(divergence).se)


def kid(real: Tensor, fake: Tensor, *, block: int = 1000, generator: torch.Generator) -> Estimate:
    """The unbiased squared MMD with the cubic kernel, and its standard error.

    Args:
        real: features of the data, (N, D).
        fake: features of the generated images, (M, D).
        block: images of each kind in a block; there are min(N, M) // block disjoint blocks.
        generator: the source of the order in which images are put into blocks.

    Raises:
        ValueError: shapes do not fit, or fewer than two blocks.
    """
    from torchmetrics.image.kid import poly_mmd

    real, fake = _checked(real, fake)
    count = min(len(real), len(fake)) // block
    if block < 2 or count < 2:
        raise ValueError(
            f"KID needs at least two blocks of at least two images, got {len(real)} and {len(fake)} images "
            f"for blocks of {block}"
        )
    blocks = [
        features[torch.randperm(len(features), generator=generator)[: count * block].to(features.device)]
        for features in (real, fake)
    ]
    pairs = zip(*(features.split(block) for features in blocks), strict=True)
    return mean_estimate(torch.stack([poly_mmd(f_real, f_fake) for f_real, f_fake in pairs]))


def _checked(real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
    for name, features in (("real", real), ("fake", fake)):
        if features.ndim != 2 or len(features) < 2 or not bool(torch.isfinite(features).all()):
            raise ValueError(
                f"{name} features must be finite, of shape (N, D) with N > 1, got {tuple(features.shape)}"
            )
    if real.shape[1] != fake.shape[1]:
        raise ValueError(f"features must have one dimension, got {real.shape[1]} (real) and {fake.shape[1]}")
    return real.double(), fake.double()
