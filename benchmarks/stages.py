"""Where is the time of a model's blocks, and is what is measured what is kept of that?

    python benchmarks/stages.py

Blocks of equal multiply-adds take unequal time: those on large images more, which linear decay
drops least. So the share of the multiply-adds that was executed is not what a step should take.
This measures, by turns, steps with the blocks of one stage kept (those that give one shape), with
none, and with random ones, and compares the last with the time of the blocks that were drawn.
"""

import argparse

import numpy as np

from measure import fit_at_mean, interleave
from models import CASES
from tfa_stochastic_depth import set_survival_probs
from tfa_stochastic_depth.layer import stochastic_depth_layers
from variants import Setting


class Kept:
    """Steps of a variant with certain blocks kept, and the others dropped."""

    def __init__(self, variant, kept):
        self._variant = variant
        self._probs = [float(k) for k in kept]

    def step(self):
        """Does one step."""
        return self._variant.step()

    def before_step(self):
        """Decides which blocks the next step keeps."""
        set_survival_probs(self._variant.model, self._probs)


def main(argv=None):
    """Prints what each stage takes, and for each depth rule what was to be expected of that.

    Returns:
        (stage -> share of the plain model's step, `None` being what remains without any block;
        rule -> (executed share of multiply-adds, share of time expected, measured, its error)).
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CASES, default="resnet110")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    args = parser.parse_args(argv)
    case = CASES[args.model]
    setting = Setting(case, quick=args.quick)
    dropped = setting.make("batch 0")
    of_block = [tuple(x.layer.output.shape) for x in stochastic_depth_layers(dropped.model)]
    of_block = np.array([str(shape) for shape in of_block])
    stages = list(dict.fromkeys(of_block))
    variants = {"plain": setting.make("plain"), None: Kept(dropped, np.zeros(len(of_block)))}
    variants |= {stage: Kept(dropped, of_block == stage) for stage in stages}
    random = {label: setting.make(f"batch {label}") for label in case.rules}
    seconds = interleave({**variants, **random}, args.turns)

    ratios = {name: s / seconds["plain"] for name, s in seconds.items()}
    rest = float(np.median(ratios[None]))
    shares = {stage: float(np.median(ratios[stage])) - rest for stage in stages} | {None: rest}
    print(f"{args.model}, {args.turns} turns, shares of the plain model's step")
    for stage in stages:
        print(f"{sum(of_block == stage)} blocks that give {stage}: {shares[stage]:.3f}")
    print(f"all else: {rest:.3f}")
    each = np.array([shares[stage] / sum(of_block == stage) for stage in of_block])
    found = {}
    for label, variant in random.items():
        time = rest + variant.switches.drawn() @ each
        measured, error = fit_at_mean(time, ratios[label])
        executed = float(variant.executed().mean())
        found[label] = executed, float(time.mean()), measured, error
        print(
            f"{label}: {executed:.3f} of the multiply-adds, {time.mean():.3f} of the time expected,"
            f" {measured:.3f} +- {error:.3f} measured"
        )
    return shares, found


if __name__ == "__main__":
    main()
