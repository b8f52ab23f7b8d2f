"""What can only be measured in a process that does nothing else: peak memory, and trace time.

    python benchmarks/alone.py memory transformer "batch 0.5"
    python benchmarks/alone.py trace resnet110 plain
    python benchmarks/alone.py fit resnet110 plain

prints one line of JSON; `run.py` starts one such process for every number.

Memory is the highest resident size while training steps run, minus the resident size before the
first of them. Linux keeps a mark of the highest size, which starts anew here when model, weights
and traced graph are there already, so that what importing and tracing took for a moment is not
counted; elsewhere the mark is that of the whole process. TensorFlow frees what it does not need any
more, but the C library would keep it for later: `run.py` sets `MALLOC_MMAP_THRESHOLD_`, so that
large tensors go back to the system at once, and the highest size is that of the tensors. Operations
run one after the other, in the same order in every process. What a random variant holds at most is
decided by its fullest step, and the share executed in that step is what `executed` says.

Trace time is that of the first training step, which traces, optimizes and runs the graph. For
`trace` it is the bare step of the other tables (gradient of a square, SGD); for `fit` it is one of
Keras, with `compile` and `train_on_batch`: what somebody who calls `fit` waits for.
"""

import argparse
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import time

import tensorflow as tf

from models import CASES, CHAIN
from variants import Setting

# What is measured: for each model its variants, `plain` among them.
PLANS = {
    "memory": {"transformer": ("plain", "batch 0.5", "batch 0", "row 0.5")},
    "trace": {"resnet110": ("plain", "batch 1 to 0.5"), "chain": ("plain", "batch 0.5")},
    "fit": {"resnet110": ("plain", "batch 1 to 0.5")},
}

STATUS, MARK = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")

# Where activations outweigh weights by far.
BATCH_SIZES = {"transformer": 192, "convnext": 64}


def restart_mark():
    """Makes the highest resident size the one of now, where the system can do that."""
    if MARK.exists():
        MARK.write_text("5")


def resident(highest):
    """The highest or (where it is known) the present resident size of this process, in MB."""
    if not STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS
    field = "VmHWM" if highest else "VmRSS"
    return int(re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text()).group(1)) / 2**10


def memory(case, name, quick, steps=4):
    """The MB that training takes on top of what is there before it."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    batch_size = None if quick else BATCH_SIZES.get(case)
    setting = Setting(CASES[case], quick=quick, batch_size=batch_size)
    variant = setting.make(name)
    variant.trace()
    restart_mark()
    before = resident(highest=False)
    for _ in range(2 if quick else steps):
        variant.before_step()
        variant.step().numpy()
    return {"MB": resident(highest=True) - before, "executed": float(variant.executed().max())}


def trace(case, name, quick):
    """Seconds of building the model and of the first training step."""
    return _first(case, name, quick, lambda variant: variant.step().numpy())


def fit(case, name, quick):
    """The same for a model that Keras trains."""
    return _first(case, name, quick, lambda variant: variant.fit_step())


def _first(case, name, quick, step):
    sys.setrecursionlimit(100_000)  # Keras goes through the layers of a new model by recursion
    tf.function(lambda x: x + 1)(tf.ones(())).numpy()  # TensorFlow itself starts up
    start = time.perf_counter()
    variant = Setting(CHAIN if case == "chain" else CASES[case], quick=quick).make(name)
    built = time.perf_counter()
    step(variant)
    return {"build": built - start, "first_step": time.perf_counter() - built}


MEASURES = {"memory": memory, "trace": trace, "fit": fit}


def in_process(what, model, variant, quick):
    """What `alone.py` measures."""
    command = [sys.executable, __file__, what, model, variant]
    # Fixed, so that every tensor above 128 KB goes back to the system when it is freed.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        command + ["--quick"] * quick, env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def in_processes(what, model, repeats, quick):
    """Runs each variant of a plan in processes of its own, by turns.

    Returns:
        Name -> list of results.
    """
    results = {name: [] for name in PLANS[what][model]}
    for _ in range(repeats):
        for name in results:
            results[name].append(in_process(what, model, name, quick))
    return results


def print_processes(what, model, results):
    """Prints medians of what was measured in processes, as shares of plain."""
    unit = "MB" if what == "memory" else "first_step"
    print(f"\n{what}, {model}, in processes of their own; {unit}: median, least and most")
    plain = statistics.median(run[unit] for run in results["plain"])
    for name, runs in results.items():
        values = [run[unit] for run in runs]
        median = statistics.median(values)
        more = f"executed at most {runs[0]['executed']:.3f}" if "executed" in runs[0] else ""
        spread = f"{min(values):.2f} {max(values):.2f}"
        print(f"{name:22}{median:10.2f}{spread:>20}{median / plain:8.3f} of plain  {more}")


def main(argv=None):
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tuple(MEASURES))
    parser.add_argument("model", choices=(*CASES, "chain"))
    parser.add_argument("variant", help='such as "plain" or "batch 0.5"')
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    print(json.dumps(MEASURES[args.what](args.model, args.variant, args.quick)))


if __name__ == "__main__":
    main()
