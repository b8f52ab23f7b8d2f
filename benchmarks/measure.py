"""Timing in turns, and what the times say.

One turn runs one step of every variant, in an order that rotates, and a time counts as its ratio
to `plain` of the same turn: whatever else the machine is doing slows both alike.
"""

import statistics
import time

import numpy as np


def interleave(variants, turns, warmup=3):
    """Seconds of every step.

    Args:
        variants: Name -> `Variant`.
        turns: How many steps of each are timed.
        warmup: How many steps of each come before, the first of which traces.

    Returns:
        Name -> array of seconds, one for each turn.
    """
    for variant in variants.values():
        for _ in range(warmup):
            variant.step().numpy()
    seconds = {name: [] for name in variants}
    names = list(variants)
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            variants[name].before_step()
            start = time.perf_counter()
            variants[name].step().numpy()
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def fit(executed, ratios, keep=0.8):
    """A line through (executed share, ratio to plain), by least trimmed squares.

    Noise comes as turns in which something else ran, far off on either side, depending on which of
    the two steps it hit. A trimmed mean of the ratios would be right for steps that all do the
    same. But steps that drop at random do differ, and trimming would cut the drops as well as the
    noise. So what is trimmed are the residuals: fit, keep the share `keep` of turns nearest to the
    line, and fit again. What the executed share explains is never cut.

    Returns:
        (intercept, slope). With one executed share only the slope is 0, and the intercept a
        trimmed mean.
    """
    kept = np.ones(len(ratios), bool)
    for _ in range(4):
        x, y = executed[kept], ratios[kept]
        spread = np.var(x)
        slope = np.mean((x - x.mean()) * (y - y.mean())) / spread if spread > 1e-12 else 0.0
        intercept = y.mean() - slope * x.mean()
        distance = np.abs(ratios - intercept - slope * executed)
        kept = distance <= np.quantile(distance, keep)
    return float(intercept), float(slope)


def fit_at_mean(executed, ratios, resamples=200):
    """The fitted ratio at the mean executed share, and its standard error over the turns.

    It is to be compared with the mean executed share: both are of the same turns, so that it does
    not matter how far these are from what was to be expected. The error is that of the bootstrap.
    """

    def estimate(turns):
        intercept, slope = fit(executed[turns], ratios[turns])
        return intercept + slope * mean

    mean, count = executed.mean(), len(ratios)
    rng = np.random.default_rng(0)
    error = np.std([estimate(rng.integers(count, size=count)) for _ in range(resamples)])
    return estimate(np.arange(count)), float(error)


def summary(seconds, plain, executed):
    """What is said of one variant, all numbers floats.

    Args:
        seconds: Its seconds, one for each turn.
        plain: Those of the variant it is compared with.
        executed: The share of the branches' multiply-adds that each step executed.
    """
    ratios = seconds / plain
    low, median, high = statistics.quantiles(ratios.tolist(), n=4)
    fitted, error = fit_at_mean(executed, ratios)
    return {
        "executed": float(executed.mean()),
        "fit": fitted,
        "error": error,
        "mean": float(seconds.mean() / plain.mean()),
        "median": median,
        "low": low,
        "high": high,
        "ms": float(np.median(seconds) * 1e3),
    }
