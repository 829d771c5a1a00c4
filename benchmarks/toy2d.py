"""A part of the two-dimensional experiment: chosen sets and arms, each with its own number of seeds.

For machines on which all of `curlfree reproduce toy2d` would take too long. The paper's arms are measured by
the authors' rules and by the exact score, ours by the exact score. What a folder holds already is kept, so
that the parts can be made one after another; what was not asked for is "not run" in the tables.

    python benchmarks/toy2d.py spirals:U:3 spirals:U+:5 spirals:QC+:5 spirals:C+:5 --out RUN
"""

import argparse
from dataclasses import replace
from pathlib import Path

from curlfree.experiments import toy2d
from curlfree.experiments.toy2d_eval import Sizes
from curlfree.report import write_report


def task(word: str) -> toy2d.Task:
    """The task that SET:ARM:SEEDS names."""
    key, name, seeds = word.split(":")
    for planned in toy2d.plan("corrected", False, int(seeds)):
        if (planned.key, planned.name) == (key, name):
            return planned
    raise SystemExit(f"expected SET:ARM:SEEDS with a set and an arm of the experiment, found {word!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", help="SET:ARM:SEEDS")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the record")
    args = parser.parse_args()
    tasks = [task(word) for word in args.tasks]
    record = toy2d.measure(tasks, Sizes(), mode="corrected", quick=False, out=args.out)
    chosen = " ".join(args.tasks)
    part = f"A part of the experiment, made piece by piece; set, arm and number of seeds: {chosen}."
    replace(record, summary=[part, *record.summary]).save(args.out)
    write_report(args.out)
    print("\n".join(record.summary))


if __name__ == "__main__":
    main()
