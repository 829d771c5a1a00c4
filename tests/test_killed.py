"""Runs that are killed: they go on, and end with the same bits."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from curlfree import checkpoint as ckpt
from curlfree.config import RunConfig, save_config
from curlfree.train import train
from training import QC, TOY, Forked, images, pack, places, with_train

PATIENCE = 240.0


def newest_step(run: Path) -> int:
    return max((ckpt.step_of(path) for path in ckpt.checkpoints(run)), default=0)


def wait_until(condition, process) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, "the process ended too early"
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def run_on_cpu(config: RunConfig, out: Path) -> None:
    train(config, out, device="cpu")


def assert_same_end(one: Path, other: Path) -> None:
    a, b = (ckpt.load(ckpt.checkpoints(run)[-1]) for run in (one, other))
    assert a.state == b.state
    for left, right in ((a.model, b.model), (a.ema, b.ema), (a.optimizer, b.optimizer)):
        assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def killed_at_random(config: RunConfig, out: Path, kills: int, delay: float, rng: random.Random) -> None:
    """Run until the end, killed that many times, each time at a random moment after a random step.

    The delay in seconds is about that of a start and a few steps.
    """
    last = config.train.steps
    for target in sorted(rng.randint(0, int(0.8 * last)) for _ in range(kills)):
        run = Forked(run_on_cpu, config, out)
        wait_until(lambda target=target: newest_step(out) >= target, run)
        time.sleep(rng.uniform(0, delay))
        run.kill()
        run.join()
        assert run.exitcode == -signal.SIGKILL
    run = Forked(run_on_cpu, config, out)
    run.join(PATIENCE)
    assert run.exitcode == 0


def test_killed_at_20_random_moments_a_run_ends_with_the_same_bits(tmp_path):
    toy = replace(TOY, objective=replace(QC, every=2))
    config = with_train(toy, steps=100, checkpoint_every=2, log_every=5, validation_samples=0)
    train(config, tmp_path / "whole", device="cpu")
    killed_at_random(config, tmp_path / "killed", 20, 0.04, random.Random(1))
    assert_same_end(tmp_path / "whole", tmp_path / "killed")
    whole, killed = (
        [line.split(",")[0] for line in path.read_text().splitlines() if "provenance" not in line]
        for path in (tmp_path / name / "log.jsonl" for name in ("whole", "killed"))
    )
    assert whole == killed


def test_killed_at_20_random_moments_an_image_run_with_dropout_ends_with_the_same_bits(tmp_path):
    config = with_train(
        images(pack(tmp_path), dropout=0.3), steps=40, checkpoint_every=2, validation_samples=0
    )
    train(config, tmp_path / "whole", device="cpu")
    killed_at_random(config, tmp_path / "killed", 20, 0.4, random.Random(2))
    assert_same_end(tmp_path / "whole", tmp_path / "killed")


def command(config: RunConfig, folder: Path) -> list[str]:
    save_config(config, folder / "wanted.json")
    return [
        "-m",
        "curlfree",
        "train",
        str(folder / "wanted.json"),
        "--out",
        str(folder / "run"),
        "--device=cpu",
    ]


def test_sigterm_exits_0_and_says_how_to_continue(tmp_path):
    config = with_train(TOY, steps=10**6, checkpoint_every=5, validation_samples=0)
    process = subprocess.Popen(
        [sys.executable, *command(config, tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    wait_until(lambda: newest_step(tmp_path / "run") >= 5, process)
    process.terminate()
    said, _ = process.communicate(timeout=PATIENCE)
    step = newest_step(tmp_path / "run")
    run = tmp_path / "run"
    assert process.returncode == 0
    assert said == f"stopped at step {step}; continue with: curlfree train {run}/config.json --out {run}\n"


LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def worker(agent: subprocess.Popen, rank: int) -> int:
    """The process of one of torchrun's workers."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    environments = {int(pid): "\0" + Path(f"/proc/{pid}/environ").read_text() for pid in children}
    return next(pid for pid, environment in environments.items() if f"\0RANK={rank}\0" in environment)


def test_sigterm_to_all_of_torchrun_saves_once_and_the_run_goes_on(tmp_path):
    """The workers get it from the group, from their agent and once more; then two without an agent go on."""
    long = {"steps": 10**6, "batch_size": 2**17}  # a step takes longer than passing on a signal
    config = with_train(replace(TOY, objective=QC), checkpoint_every=2, validation_samples=0, **long)
    run = tmp_path / "run"
    agent = subprocess.Popen(
        [sys.executable, *LAUNCHER, *command(config, tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: newest_step(run) >= 2, agent)
    writer, before = worker(agent, 0), newest_step(run)
    os.killpg(agent.pid, signal.SIGTERM)
    for _ in range(3):
        time.sleep(0.01)
        if newest_step(run) == before:
            os.kill(writer, signal.SIGTERM)
    said, _ = agent.communicate(timeout=PATIENCE)
    step = newest_step(run)
    assert said.startswith(f"stopped at step {step};")
    ckpt.verify(ckpt.path_of(run, step))

    pair = [Forked(run_on_cpu, config, run, place=place) for place in places()]
    wait_until(lambda: newest_step(run) > step, pair[0])
    for process in pair * 2:
        process.terminate()
    for process in pair:
        process.join(PATIENCE)
    assert [process.exitcode for process in pair] == [0, 0]
    stopped = newest_step(run)
    assert stopped > step
    assert train(with_train(config, steps=stopped + 2), run, device="cpu") == stopped + 2


def test_a_worker_killed_under_torchrun_is_restarted_and_the_run_finishes(tmp_path):
    """Two workers end, up to rounding, where one process does."""
    toy = with_train(replace(TOY, objective=QC), precision="float64", validation_samples=0)
    config = with_train(toy, steps=80, checkpoint_every=5, batch_size=4096)
    train(config, tmp_path / "alone", device="cpu")
    agent = subprocess.Popen([sys.executable, *LAUNCHER, "--max-restarts=3", *command(config, tmp_path)])
    run = tmp_path / "run"
    for rank, target in ((1, 10), (0, 30)):
        wait_until(lambda target=target: newest_step(run) >= target, agent)
        os.kill(worker(agent, rank), signal.SIGKILL)
    assert agent.wait(PATIENCE) == 0
    a, b = (ckpt.load(ckpt.path_of(folder, 80)) for folder in (tmp_path / "alone", run))
    for name, tensor in a.ema.items():
        torch.testing.assert_close(b.ema[name], tensor, rtol=1e-6, atol=1e-8)
