r"""The metrics of an evaluation. Each function does the work, shared and kept, and returns what sums it up.

On held-out data: the denoising score-matching loss by noise level (Eq. A4), the error against a known score
(Eq. 1), the negative log-likelihood, Asym, NAsym and the loop work (`curlfree.audit`). On samples: how many
evaluations RK45 needs at a tolerance; precision and recall, for images in the space of a feature network,
with FID, KID and IS.

Standard errors are over images or points: an image's levels and probes are averaged first. Only the means of
the audit over levels, which share their images, have an upper bound instead: the mean of the levels' errors.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from curlfree.build import compile_field
from curlfree.config import SampleConfig
from curlfree.evaluation import (
    EvaluateConfig,
    Evaluation,
    Metric,
    absent,
    by_level,
    entry,
    finite,
    gaussian,
    level_entry,
    open_data,
)
from curlfree.features import FeatureNetwork, extract, fid, inception_score, kid, load_network
from curlfree.likelihood import TIGHTER, dequantise, log_prob, summarise
from curlfree.metrics import Estimate, audit, mean_estimate
from curlfree.neighbours import precision_recall
from curlfree.objectives import dsm, esm
from curlfree.pieces import Tensors, fingerprint, load_tensors, save_tensors
from curlfree.sample import Samples, draw, home, sample
from curlfree.seeds import stream

Summary = Callable[[], dict[str, Metric]]
_CHECKED = 8  # rows of a likelihood's data on which the solver's error is measured


def score_matching_loss(task: Evaluation) -> Summary:
    """The held-out ``sigma^2/2 ||s + z/sigma||^2``, summed over dimensions (Eqs. 5, A4)."""
    sigmas = task.run.process.levels(task.config.levels)

    @torch.no_grad()
    def batch(rows: Tensor, i: int) -> Tensors:
        x0, condition = task.clean(rows)
        losses = []
        for level, sigma in enumerate(sigmas.to(x0)):
            z = gaussian(x0, task.config.seed, "loss", level, i)
            loss = dsm(task.run.field, x0, sigma.expand(len(x0)), z, condition=condition)
            losses.append(sigma**2 * loss)
        return {"loss": torch.stack(losses, 1).double().cpu()}

    found = task.batches("loss", batch, levels=task.config.levels)
    return lambda: {
        "loss": by_level(
            torch.cat([p["loss"] for p in found]),
            sigmas,
            f"sigma^2/2 ||s + z/sigma||^2 summed over dimensions (Eqs. 5, A4), mean over {task.about} and "
            f"{len(sigmas)} noise levels equally spaced in time",
        )
    }


def score_error(task: Evaluation) -> Summary:
    """The distance to the exact score at the same level, ``1/2 ||s - score||^2`` (Eq. 1)."""
    distribution = task.data.distribution
    if distribution is None:
        raise ValueError("metrics: 'score-error' needs data with a known score, found images")
    sigmas = task.run.process.levels(task.config.levels)

    @torch.no_grad()
    def batch(rows: Tensor, i: int) -> Tensors:
        x0, condition = task.clean(rows)
        errors = []
        for level, sigma in enumerate(sigmas.to(x0)):
            x = x0 + sigma * gaussian(x0, task.config.seed, "score-error", level, i)
            s = sigma.expand(len(x))
            errors.append(esm(task.run.field, x, s, distribution.score(x, s), condition=condition))
        return {"error": torch.stack(errors, 1).double().cpu()}

    found = task.batches("score-error", batch, levels=task.config.levels)
    return lambda: {
        "score_error": by_level(
            torch.cat([p["error"] for p in found]),
            sigmas,
            f"1/2 ||s - exact score||^2 (Eq. 1), not weighted, mean over {task.about} with noise and "
            f"{len(sigmas)} noise levels equally spaced in time",
        )
    }


def likelihood(task: Evaluation) -> Summary:
    """The negative log-likelihood, with the data's spread, the probes' noise and the solver's error apart."""
    run, config, distribution = task.run, task.config, task.data.distribution
    probes = None if distribution else config.probes
    sigma_min = run.process.sigma_range[0]

    def batch(rows: Tensor, i: int, tolerance: float = 1.0) -> Tensors:
        raw, labels = task.data.rows(rows)
        device = raw.device
        if distribution:
            x = raw + sigma_min * gaussian(raw, config.seed, "nll", i)
        else:
            x = dequantise(raw, stream(config.seed, "dequantise", i, device=device)).to(home(run.field).dtype)
        found = log_prob(
            run.field,
            x,
            run.process,
            probes=probes,
            generator=stream(config.seed, "probes", i, device=device),
            rtol=tolerance * config.rtol,
            atol=tolerance * config.atol,
            condition=task.condition(labels),
        )
        tensors = {"draws": found.draws.cpu(), "evaluations": found.evaluations.cpu()}
        if distribution:
            tensors["exact"] = distribution.log_prob(x, x.new_full((len(x),), sigma_min)).double().cpu()
        return tensors

    settings = {"probes": probes, "rtol": config.rtol, "atol": config.atol}
    found = task.batches("nll", batch, **settings)
    checked = min(_CHECKED, task.n)

    def change(i: int) -> Tensors:
        loose, tight = (batch(task.chosen(0, checked), i, t)["draws"] for t in (1.0, TIGHTER))
        return {"change": (tight - loose).mean(1)}

    about = {"data": task.data.name, "seed": config.seed, "checked": checked, **settings}
    (solver,) = task.pieces("nll-solver", change, [about])

    def summary() -> dict[str, Metric]:
        draws, each = (torch.cat([p[name] for p in found]) for name in ("draws", "evaluations"))
        nll = summarise(draws, each, probes=probes, change=solver["change"])
        if not distribution:
            nll = nll.bits_per_dim(task.clean(task.chosen(0, 1))[0].numel())
        metric = {
            **entry(Estimate(nll.value, nll.se), nll.n, ""),
            "unit": nll.unit,
            "probe_se": finite(nll.probe_se),
            "solver_error": nll.solver_error,
            "nfe": nll.nfe,
        }
        trace = "exact divergence" if probes is None else f"{probes} Hutchinson probes per image"
        at = f"noise of sigma_min = {sigma_min:g}" if distribution else "uniform dequantisation, (x + u)/256"
        metric["how"] = (
            f"-log p by the probability-flow ODE, {trace}, RK45 at rtol {config.rtol:g}, "
            f"atol {config.atol:g}, on {task.about} with {at}; se is over data and contains probe_se, the "
            f"probes' own; solver_error is the change at {TIGHTER:g} times the tolerances on {checked}"
        )
        if distribution:
            exact = -torch.cat([p["exact"] for p in found])
            metric["exact"] = entry(
                mean_estimate(exact), len(exact), "-log p of the true density, same points"
            )
            excess = mean_estimate(-draws.mean(1) - exact)
            metric["excess"] = entry(excess, len(exact), "paired difference to it")
        return {"nll": metric}

    return summary


def asymmetry(task: Evaluation) -> Summary:
    """Asym, NAsym and the loop work by noise level (Eqs. A7, A8)."""
    config, sigmas = task.config, task.run.process.levels(task.config.levels)
    n = min(config.audit_n, task.data.count)
    field = task.run.field
    if config.audit_compile:  # a copy, because other metrics have batches of many sizes
        field = copy.deepcopy(field)
        compile_field(task.run.config, field)

    def level(i: int) -> Tensors:
        x0, condition = task.clean(task.chosen(0, n))
        (row,) = audit(
            field,
            x0,
            task.run.process,
            levels=sigmas[i : i + 1],
            probes=config.audit_probes,
            batch=config.batch,
            generator=stream(config.seed, "audit", i, device=x0.device),
            condition=condition,
        ).levels
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in row.items()}

    settings = {
        "data": task.data.name,
        "n": n,
        "levels": config.levels,
        "probes": config.audit_probes,
        "batch": config.batch,
        "seed": config.seed,
    } | ({"compile": True} if config.audit_compile else {})
    found = task.pieces("asymmetry", level, [settings] * len(sigmas))

    def mean(name: str, what: str) -> Metric:
        values, errors = (torch.stack([row[key] for row in found]) for key in (name, f"{name}_se"))
        rows = [
            level_entry(s, Estimate(v, e), n)
            for s, v, e in zip(sigmas.tolist(), values.tolist(), errors.tolist(), strict=True)
        ]
        how = (
            f"{what}, mean over {len(rows)} noise levels equally spaced in time; "
            f"{n} of {task.data.name}, {config.audit_probes} probes of the skew form; "
            "se is an upper bound, the mean of the levels'"
        )
        estimate = Estimate(float(values.mean()), float(errors.mean()))
        return {**entry(estimate, n, how), "levels": rows}

    return lambda: {
        "asym": mean("asym", "1/2 ||J - J^T||^2"),
        "nasym": mean("nasym", "sum of 1/4 ||J - J^T||^2 over the sum of ||J||^2"),
        "work_nats": mean("work_nats", "rms work in nats around circles x0 + sigma (z1 cos + z2 sin)"),
    }


def evaluations(task: Evaluation) -> Summary:
    """How many evaluations RK45 needs, against its tolerance."""
    config, tolerances = task.config, task.config.tolerances

    def tolerance(i: int) -> Tensors:
        t = tolerances[i]
        how = SampleConfig(sampler="ode", per_sample=True, rtol=t, atol=t, seed=config.seed)
        return {"evaluations": draw(task.run, how, range(config.nfe_n))["evaluations"]}

    settings = [{"tolerance": t, "n": config.nfe_n, "seed": config.seed} for t in tolerances]
    found = task.pieces("nfe", tolerance, settings)

    def summary() -> dict[str, Metric]:
        estimates = [mean_estimate(p["evaluations"].double()) for p in found]
        rows = [
            {"rtol": t, "atol": t, "value": e.value, "se": finite(e.se), "n": config.nfe_n}
            for t, e in zip(tolerances, estimates, strict=True)
        ]
        tightest = min(range(len(rows)), key=lambda i: tolerances[i])
        how = (
            "network evaluations of RK45 with its error controlled in each sample and Tweedie's step, mean "
            f"over {config.nfe_n} samples, at rtol = atol = {tolerances[tightest]:g}; others in tolerances"
        )
        return {"nfe": {**entry(estimates[tightest], config.nfe_n, how), "tolerances": rows}}

    return summary


def samples(task: Evaluation) -> Summary:
    """How samples differ from data: precision and recall, and for images FID, KID and IS."""
    config = task.config
    drawn = sample(task.run, config.samples, team=task.team, progress=task.progress)
    if task.data.distribution:
        n = config.reference_n or config.samples.n
        real = open_data(task.run, split="reference", n=n, seed=config.seed)
        points = real.rows(torch.arange(n))[0]
        return lambda: _drawn(drawn, _precision_recall(points, drawn.x, config.neighbours, "coordinates"))
    if config.features is None:
        raise ValueError("metrics: 'samples' of images needs a feature network; name one with `features`")
    network, identity = load_network(config.features, home(task.run.field).device)
    reference = reference_features(task, network, identity)
    size = config.samples.batch

    def batch(i: int) -> Tensors:
        images = drawn.x[i * size : (i + 1) * size].permute(0, 3, 1, 2).contiguous()
        return extract(network, images.to(home(task.run.field).device))

    about = {"network": identity, **drawn.settings}
    rows = [{"rows": len(part)} for part in drawn.x.split(size)]
    found = task.pieces("features", batch, rows, about)

    def summary() -> dict[str, Metric]:
        real = load_tensors(reference)["features"].to(home(task.run.field).device)
        fake = torch.cat([p["features"] for p in found]).to(real.device)
        n = len(fake)
        source = f"{identity}; {config.reference} split, {len(real)} images"
        metrics = {
            "fid": entry(
                fid(real, fake), n, f"Frechet distance of features of {source}; biased up by O(1/n)"
            ),
            "kid": _kid(real, fake, config, f"features of {source}"),
            **_precision_recall(real, fake, config.neighbours, f"features of {source}"),
        }
        if "logits" in found[0]:
            logits = torch.cat([p["logits"] for p in found])
            how = f"exp of the mean KL to the marginal, without splits, logits of {identity}"
            metrics["inception_score"] = entry(inception_score(logits), n, how)
        return _drawn(drawn, metrics)

    return summary


def reference_features(task: Evaluation, network: FeatureNetwork, identity: str) -> Path:
    """The file with the features of the data, made if it is not there.

    Raises:
        ValueError: the file is there, but truncated or altered.
    """
    config = task.config
    data = open_data(task.run, split=config.reference, n=0, seed=config.seed)
    n = min(config.reference_n or data.count, data.count)
    who = {"network": identity, "data": data.name, "n": n, "seed": config.seed}
    path = (config.references or task.folder) / f"reference-{fingerprint(who)}.safetensors"
    # Only rank 0 looks: another job may write the file between two ranks' looks, and all must go one way.
    if task.team.agree(task.team.leads and path.exists()):
        load_tensors(path, who)
        return path
    order = torch.randperm(data.count, generator=stream(config.seed, "reference"))[:n].sort().values
    parts = order.split(config.batch)
    settings = [{"rows": len(part)} for part in parts]
    found = task.pieces("reference", lambda i: extract(network, data.rows(parts[i])[0]), settings, who)
    if task.team.rank == 0:
        save_tensors(path, {"features": torch.cat([p["features"] for p in found])}, who)
    return path


def _drawn(drawn: Samples, metrics: dict[str, Metric]) -> dict[str, Metric]:
    """The metrics with a note on how the samples were drawn."""
    nfe = float(drawn.evaluations.double().mean())
    by = {name: drawn.settings[name] for name in ("sampler", "steps", "guidance", "seed")}
    note = f"; {len(drawn.x)} samples by {by['sampler']}, {nfe:.5g} network evaluations each"
    return {
        name: {**metric, "how": metric["how"] + note, "samples": {**by, "nfe": nfe}}
        for name, metric in metrics.items()
    }


def _kid(real: Tensor, fake: Tensor, config: EvaluateConfig, space: str) -> Metric:
    n, block = len(fake), min(config.kid_block, len(real) // 4, len(fake) // 4)
    if block < 2:
        return absent(
            n,
            "blocks are a quarter of the images or kid_block, whichever is less, and need at least 2 images; "
            f"found {len(real)} real and {n} generated, kid_block = {config.kid_block}",
        )
    how = f"unbiased MMD^2, cubic kernel, mean over disjoint blocks of {block}, {space}"
    return entry(kid(real, fake, block=block, generator=stream(config.seed, "kid")), n, how)


def _precision_recall(real: Tensor, fake: Tensor, k: int, space: str) -> dict[str, Metric]:
    if min(len(real), len(fake)) <= k:
        why = f"k = {k} needs more than {k} of each, found {len(real)} real and {len(fake)} generated"
        return {"precision": absent(len(fake), why), "recall": absent(len(real), why)}
    found = precision_recall(real, fake.to(real), k)
    how = (
        f"k = {k} nearest neighbours, {found.n_real} real and {found.n_fake} generated, {space}; binomial se"
    )
    return {
        "precision": entry(Estimate(found.precision, found.precision_se), found.n_fake, how),
        "recall": entry(Estimate(found.recall, found.recall_se), found.n_real, how),
    }


METRICS: dict[str, Callable[[Evaluation], Summary]] = {
    "loss": score_matching_loss,
    "score-error": score_error,
    "nll": likelihood,
    "asymmetry": asymmetry,
    "nfe": evaluations,
    "samples": samples,
}
