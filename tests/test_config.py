import json
from dataclasses import replace

import pytest
import torch

from curlfree.build import build_data, build_field, event_shape
from curlfree.config import (
    ObjectiveConfig,
    OptimConfig,
    PackedData,
    RunConfig,
    ToyData,
    TrainConfig,
    decode,
    differences,
    encode,
    load_config,
    save_config,
)
from curlfree.estimators import normalized_asymmetry
from curlfree.experiments.toy2d_train import PAPER_ARMS, PROBLEMS, paper_recipe
from curlfree.nets.mlp import FilmMLP, FilmMLPConfig, PaperMLP, PaperMLPConfig
from curlfree.penalty import AUTO_FRACTION
from curlfree.presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_its_json(tmp_path, name):
    save_config(PRESETS[name], tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == PRESETS[name]
    assert PRESETS[name].name == name


def test_the_image_presets_have_the_papers_constants():
    config = preset("cifar10-qc")
    assert config.process.sigma_range == pytest.approx((0.01, 50.0))
    assert config.optim == OptimConfig(lr=2e-4, betas=(0.9, 0.999), warmup=5000, clip=1.0, ema=0.999)
    assert config.objective.lmbda == 1e-4 and config.objective.weighting == "sigma2"
    assert config.train.batch_size == 128 and config.field.network.dropout == 0.1
    network = preset("cifar10-u").field.network
    assert network == config.field.network and (network.width, network.blocks) == (128, 8)


def test_the_automatic_fraction_is_a_word_in_the_file_and_a_number_in_training():
    config = decode(RunConfig, edited("objective/fraction", "auto"))
    assert encode(config)["objective"]["fraction"] == "auto"
    assert config.objective.share == AUTO_FRACTION == preset("cifar10-qc").objective.share
    assert decode(RunConfig, edited("objective/fraction", 1)).objective.share == 1.0


def test_an_unknown_preset_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match=r"unknown preset 'cifar'; expected one of .*cifar10-qc"):
        preset("cifar")


def edited(path: str, value: object) -> dict:
    data = json.loads(json.dumps(encode(preset("tiny-qc"))))
    *parents, last = path.split("/")
    place = data
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train/stps", 3, r"train\.stps: unknown key; expected one of steps,"),
        ("extra", {}, r"extra: unknown key"),
        ("process/ve/sigma_mid", 1.0, r"process\.sigma_mid: unknown key"),
        ("data", ..., r"data: missing"),
        ("field/network", ..., r"field\.network: missing"),
        ("process", {"vexp": {}}, r"process: expected one of ve, vp, linear"),
        ("data", {"toy": {}, "packed": {}}, r"data: expected one of toy, packed"),
        ("train", 3, r"train: expected an object, found 3"),
        ("train/steps", "20", r"train\.steps: expected int, found '20'"),
        ("train/steps", True, r"train\.steps: expected int, found True"),
        ("train/compile", 1, r"train\.compile: expected bool, found 1"),
        ("train/precision", "half", r"train\.precision: expected .*bfloat16.* found 'half'"),
        ("optim/lr", "fast", r"optim\.lr: expected float, found 'fast'"),
        ("optim/betas", [0.9, "x"], r"optim\.betas: expected float, found 'x'"),
        ("field/form", "denoiser", r"field\.form: expected .*found 'denoiser'"),
        ("init", 3, r"init: expected str, found 3"),
        ("objective/fraction", "half", r"objective\.fraction: expected float, found 'half'"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(path, value, message):
    with pytest.raises(ValueError, match=message):
        decode(RunConfig, edited(path, value))


def test_integers_are_numbers_and_defaults_may_be_left_out():
    assert decode(RunConfig, edited("optim/lr", 1)).optim.lr == 1.0
    assert decode(RunConfig, edited("optim/eps", ...)) == preset("tiny-qc")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToyData(name="moons"), r"data\.name: expected one of .*spirals.* found 'moons'"),
        (lambda: PackedData(unlabelled=2.0), r"data\.unlabelled"),
        (lambda: ObjectiveConfig(lmbda=-1.0), r"objective\.lmbda: expected a number of at least 0, found -1"),
        (lambda: ObjectiveConfig(estimator="best"), r"objective\.estimator: expected one of .*skew"),
        (lambda: ObjectiveConfig(estimator="pair"), r"objective\.form: expected 'double' with .*'pair'"),
        (lambda: ObjectiveConfig(fraction=0.0), r"objective\.fraction"),
        (lambda: ObjectiveConfig(fraction="all"), r"objective\.fraction: .*or 'auto', found 'all'"),
        (lambda: ObjectiveConfig(every=0), r"objective\.every"),
        (lambda: ObjectiveConfig(probes=0), r"objective\.probes"),
        (lambda: ObjectiveConfig(weighting="sigma3"), r"objective\.weighting"),
        (lambda: OptimConfig(lr=0.0), r"optim\.lr"),
        (lambda: OptimConfig(betas=(0.9, 1.0)), r"optim\.betas"),
        (lambda: OptimConfig(ema=1.0), r"optim\.ema"),
        (lambda: OptimConfig(clip=0.0), r"optim\.clip"),
        (lambda: OptimConfig(warmup=-1), r"optim\.warmup"),
        (lambda: TrainConfig(steps=0), r"train\.steps: expected at least 1, found 0"),
        (lambda: TrainConfig(keep=0), r"train\.keep"),
        (lambda: TrainConfig(images=-1), r"train\.images"),
        (lambda: TrainConfig(precision="int8"), r"train\.precision"),
        (lambda: FilmMLPConfig(width=0), r"width: expected at least 1"),
        (lambda: FilmMLPConfig(data_std=0.0), r"data_std: expected a positive number"),
        (lambda: PaperMLPConfig(dimension=0), r"dimension"),
    ],
)
def test_impossible_values_are_refused_by_field(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_differences_are_named_by_field():
    one = preset("tiny-u")
    other = replace(one, seed=1, train=replace(one.train, steps=7))
    assert differences(one, one) == []
    assert differences(one, other) == ["seed: 0 != 1", "train.steps: 100 != 7"]


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"name": ')
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_config(tmp_path / "none" / "config.json")


BUILT = [name for name in PRESETS if not name.startswith("cifar10")]


@pytest.mark.parametrize("name", BUILT)
def test_fields_depend_on_the_seed_alone_and_c_is_conservative(name):
    config = preset(name)
    state = torch.get_rng_state()
    first, again = build_field(config), build_field(config)
    other = build_field(replace(config, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)
    if config.field.form != "score" and len(event_shape(config)) == 1:
        field = build_field(replace(config, train=replace(config.train, precision="float64")))
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        nasym = normalized_asymmetry(field.requires_grad_(False), x, torch.ones(4, dtype=torch.float64))
        assert float(nasym.detach().max()) < 1e-20


def test_a_form_that_a_network_does_not_have_is_refused():
    config = preset("8gaussians-u")
    with pytest.raises(ValueError, match=r"field\.form: expected a form that FilmMLPConfig has"):
        build_field(replace(config, field=replace(config.field, form="paper-energy")))


def test_the_papers_network_has_the_published_size():
    generator = torch.Generator().manual_seed(0)
    assert sum(p.numel() for p in PaperMLP(PaperMLPConfig(), generator).parameters()) == 42_509


def test_noise_only_shifts_the_papers_networks_features_but_bends_the_conditioned_ones():
    """f(x, sigma) = g(x) + h(sigma): the mixed difference over x and sigma vanishes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 2, generator=generator, dtype=torch.float64)
    near, far = torch.full((8,), 0.1, dtype=torch.float64), torch.full((8,), 2.0, dtype=torch.float64)

    def mixed(network: torch.nn.Module) -> float:
        change = network(x, far) - network(x, near)
        return float((change - change.mean(0)).abs().max() / change.abs().max())

    assert mixed(PaperMLP(PaperMLPConfig(), generator).double()) < 1e-9
    assert mixed(FilmMLP(FilmMLPConfig(width=16), generator).double()) > 1e-2


def test_toy_batches_are_functions_of_the_step_and_shared_by_workers():
    config = replace(preset("8gaussians-u"), train=replace(preset("8gaussians-u").train, batch_size=6))
    device = torch.device("cpu")
    whole = build_data(config, device).batches
    from_one, from_three = list(whole.run(0, 4)), list(whole.run(3, 4))
    assert torch.equal(from_one[3].x0, from_three[0].x0)
    parts = [next(build_data(config, device, rank, 2).batches.run(3, 4)).x0 for rank in range(2)]
    assert torch.equal(torch.cat(parts), from_one[3].x0)
    assert not torch.equal(from_one[2].x0, from_one[3].x0)


@pytest.mark.parametrize(
    ("toy", "key"), [("8gaussians", "8gaussian"), ("spirals", "spirals"), ("checkerboard", "checkerboard")]
)
def test_presets_of_a_two_dimensional_set_have_its_constants(toy: str, key: str) -> None:
    problem = PROBLEMS[key]
    for arm in ("u", "c", "qc"):
        ours, paper = PRESETS[f"{toy}-{arm}"], PRESETS[f"paper-{toy}-{arm}"]
        assert ours.data.name == paper.data.name == toy
        assert ours.field.network.data_std == pytest.approx(problem.data.data_std, rel=0.02)
        recipe = paper_recipe(problem.steps)
        assert paper.train.steps == recipe.steps
        assert paper.train.batch_size == recipe.batch
        assert paper.optim.lr == recipe.rate
        assert paper.process == recipe.process()
    assert PRESETS[f"paper-{toy}-qc"].objective.lmbda * recipe.scale == PAPER_ARMS["QC"].lmbda
