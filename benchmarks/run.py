"""What stochastic depth costs and saves: train steps, peak memory, time of the first step.

    python benchmarks/run.py                                   # everything: about an hour
    python benchmarks/run.py --quick                           # the same, tiny: does it all run?
    python benchmarks/run.py --only convolutions graph float32 # one table
    python benchmarks/run.py --only memory                     # one section
    python benchmarks/run.py --only resnet110 graph float32 --turns 300 --variants "batch 1 to 0.5"
    python benchmarks/run.py --json results.json --png results.png

Variants, each followed by its depth rule (a survival probability, or "1 to 0.5" for the linear
decay of the paper):

    plain         the model without stochastic depth, what all others are compared with
    plain/half    the same on half of the samples: what rows at 0.5 would take if picking them and
                  putting them back took no time
    mask          `shortcut + mask * branch` with one mask for the batch: the branch is computed
    mask/sample   the same with a mask for each sample, as in KerasCV and timm
    tfa           `tfa.layers.StochasticDepth`, where tensorflow-addons is installed
    batch         `wrap_residuals(model)`: one switch for the batch
    row           `wrap_residuals(model, mode="row")`: a fixed share of the samples
    predict       inference, compared with `plain predict`

Columns; all but `ms` are shares of `plain`:

    executed      the expected number: the share of the branches' multiply-adds that was executed
                  in these very turns, from the switches that were drawn
    fit, +-       the measured number: the ratio at that share by a line through all turns that
                  disregards disturbed ones, and its standard error (`measure.fit` says why)
    mean          mean step / mean step of plain
    median, quartiles  of the ratio to plain of the same turn
    ms            median step in milliseconds

Each table is measured in a process of its own: what other models leave behind in the process makes
numbers higher by 0.02 to 0.04. Below it stands the line through the turns of all `batch` variants,
over all probabilities: what remains when everything is dropped, what is reached when nothing is.
"""

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import pathlib
import platform

import numpy as np
import tensorflow as tf

from alone import PLANS, in_processes, print_processes
from masks import NotHere
from measure import fit, interleave, summary
from models import CASES
from variants import DTYPES, EXECUTIONS, Setting, names

SECTIONS = ("steps", *PLANS)
ROW = "{:22}{:>9}{:>8}{:>8}{:>8}{:>8}{:>16}{:>10}"


def measure_steps(what, quick, turns, chosen=()):
    """Times variants of a setting in turns: those chosen and their baselines, or all.

    Args:
        what: Model, execution and dtype.
        quick: Whether the model is a tiny one.
        turns: Timed steps of each variant.
        chosen: Variants.

    Returns:
        A dict: `variants`, name -> `measure.summary`; `skipped`, name -> reason; `branches`, the
        share of the model's multiply-adds that are in its branches; `line`, the fit for `batch`.
    """
    tf.get_logger().setLevel("ERROR")  # it suspects that the same step is traced again and again
    setting = Setting(CASES[what[0]], *what[1:], quick=quick)
    variants, skipped = {}, {}
    every = names(setting.case)
    wanted = {*chosen, *map(baseline, chosen), "plain"} if chosen else every
    for name in filter(wanted.__contains__, every):
        try:
            variants[name] = setting.make(name)
        except NotHere as error:
            skipped[name] = str(error)
    seconds = interleave(variants, turns)
    executed = {name: variant.executed() for name, variant in variants.items()}
    plain = {name: seconds[baseline(name)] for name in variants}
    result = {
        "variants": {n: summary(seconds[n], plain[n], executed[n]) for n in variants},
        "skipped": skipped,
        "branches": setting.branch_share(),
        "line": None,
    }
    ours = [name for name in variants if name.startswith("batch")]
    if ours:
        ratios = np.concatenate([seconds[name] / plain[name] for name in ours])
        result["line"] = fit(np.concatenate([executed[name] for name in ours]), ratios)
    return result


def baseline(name):
    """The variant that another is compared with."""
    return "plain predict" if "predict" in name else "plain"


def print_steps(title, result):
    """Prints the table of one setting."""
    print(f"\n{title}; {result['branches']:.1%} of the multiply-adds are in branches")
    print(ROW.format("", "executed", "fit", "+-", "mean", "median", "quartiles", "ms"))
    for name, row in result["variants"].items():
        shares = [f"{row[key]:.3f}" for key in ("executed", "fit", "error", "mean", "median")]
        quartiles = f"{row['low']:.3f} {row['high']:.3f}"
        print(ROW.format(name, *shares, quartiles, f"{row['ms']:.2f}"))
    for reason, those in itertools.groupby(result["skipped"], result["skipped"].get):
        print(f"not run: {', '.join(those)}: {reason}")
    if result["line"]:
        dropped, slope = result["line"]
        print(f"batch: {dropped:.3f} of plain + {slope:.3f} * executed", flush=True)


def parse_args(argv=None):
    """Reads the command line."""
    known = (SECTIONS, tuple(CASES), EXECUTIONS, DTYPES)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sum(known, ()), default=[], metavar="WORD")
    parser.add_argument("--turns", type=int, help="timed steps of each variant (40)")
    parser.add_argument("--variants", nargs="+", default=[], help="the only ones beside plain")
    parser.add_argument("--repeats", type=int, help="processes for each number (3)")
    parser.add_argument("--quick", action="store_true", help="tiny models, few turns")
    parser.add_argument("--json", type=pathlib.Path, help="also write all results to this file")
    parser.add_argument("--png", type=pathlib.Path, help="also draw the train steps")
    args = parser.parse_args(argv)
    args.turns = args.turns or (4 if args.quick else 40)
    args.repeats = args.repeats or (1 if args.quick else 3)
    there = {name for case in CASES.values() for name in names(case)}
    if unknown := set(args.variants) - there:
        parser.error(f"--variants: {', '.join(sorted(unknown))}: not in {sorted(there)}")
    chosen = [tuple(w for w in words if w in args.only) or words for words in known]
    args.sections, args.models, args.executions, args.dtypes = chosen
    of_steps = args.variants or set(args.only) & {*EXECUTIONS, *DTYPES}
    if of_steps and not set(args.only) & set(SECTIONS):
        args.sections = ("steps",)
    return args


def main(argv=None):
    """Prints the tables, and returns what is in them."""
    args = parse_args(argv)
    results = {
        "tensorflow": tf.__version__,
        "keras": "3" if hasattr(tf.keras, "ops") else "2",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "turns": args.turns,
        "steps": {},
    }
    print(", ".join(f"{key} {results[key]}" for key in ("tensorflow", "keras", "machine", "turns")))
    for what in itertools.product(args.models, args.executions, args.dtypes):
        if "steps" not in args.sections or (args.quick and what[1:] == ("xla", "mixed_bfloat16")):
            continue
        title = " / ".join(what)
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as alone:
            measured = alone.submit(measure_steps, what, args.quick, args.turns, args.variants)
        results["steps"][title] = measured.result()
        print_steps(title, results["steps"][title])
    for section in filter(PLANS.get, args.sections):
        results[section] = {}
        plan = list(PLANS[section])[-1:] if args.quick else PLANS[section]
        for model in plan:
            if model in (*args.models, "chain"):
                found = in_processes(section, model, args.repeats, args.quick)
                results[section][model] = found
                print_processes(section, model, found)
    write(results, args)
    return results


def write(results, args):
    """Writes the files that were asked for."""
    for path in filter(None, (args.json, args.png)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.png and results["steps"]:
        from picture import draw

        draw(results, args.png)


if __name__ == "__main__":
    main()
