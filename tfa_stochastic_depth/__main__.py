"""The command line: `python -m tfa_stochastic_depth report model.keras`."""

from __future__ import annotations

import argparse
import os
import sys

from tfa_stochastic_depth.errors import first_line

FAILED = 2


def main(arguments=None):
    """Runs the command line; returns the exit code, 0 or 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tfa_stochastic_depth",
        description="Stochastic depth for TensorFlow and Keras.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser(
        "report",
        help="list the residual blocks of a saved model",
        description="Prints the residual blocks that wrap_residuals would find in a saved model. "
        "Code that the file may hold is not run: a model that needs it is refused.",
    )
    report.add_argument("model", help="a file saved by Keras: model.keras, model.h5")
    report.add_argument(
        "--survival-prob",
        type=float,
        default=0.5,
        metavar="P",
        help="that of the last block, in [0, 1]; the others by linear decay (default 0.5)",
    )
    report.add_argument(
        "--nested",
        choices=("inner", "outer"),
        default="inner",
        help="which of blocks inside blocks to take (default inner)",
    )
    report.add_argument(
        "--plot", metavar="PATH", help="draw the model with its blocks: .svg, .png or .pdf"
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        print(_report(options))
    except Exception as error:  # whatever a file or its loader may hold ready
        print(f"{parser.prog}: error: {options.model}: {first_line(error)}", file=sys.stderr)
        return FAILED
    return 0


def _report(options):
    from tfa_stochastic_depth import find_residuals, load_legacy_model

    if not os.path.exists(options.model):
        raise FileNotFoundError("no such file.")
    try:
        model = load_legacy_model(options.model)
    except Exception as error:
        raise ValueError(
            f"{first_line(error)} (A model that needs code or classes of your own can be loaded in "
            "Python and given to find_residuals.)"
        ) from None
    residuals = find_residuals(model, options.survival_prob, nested=options.nested)
    if options.plot is not None:
        residuals.plot(options.plot)
    return residuals


if __name__ == "__main__":
    sys.exit(main())
