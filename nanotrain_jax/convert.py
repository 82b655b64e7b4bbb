"""Convert weights from and to model folders of Hugging Face: `python -m nanotrain_jax.convert`

    --from FOLDER --out RUN                                            a model folder -> the folder of a run, at step 0
    --run RUN --to FOLDER [--step N] [--dtype bfloat16|float32]        a run -> a model folder
                          [--merge]        of a run that trained adapters (train.lora): a folder of PEFT, with --merge a
                                           model folder of the base with its adapters

Each direction checks what it wrote (--no-check: it does not). models/HUGGING_FACE.md lists what is supported. Exit
codes: 0 done; 2 invalid request or failed write (one line on stderr), nothing is left.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanotrain_jax.run import shell

    shell.begin(finishes=True)

import argparse
import logging
from collections.abc import Sequence

import jax

from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.config.load import Parser, at_least, folder_argument, refuse
from nanotrain_jax.run import conversion, hugging_face, shell
from nanotrain_jax.run.adapter_export import Adapters


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, and print what was written and checked; an invalid request gives one line on stderr and exit code 2."""
    options = parse(argv)
    jax.config.update("jax_platforms", "cpu")
    try:
        if options.source:
            lines = conversion.to_run(hugging_face.opened(options.source), options.out, options.check)
        else:
            export = export_of(options)
            lines = conversion.to_folder(export, options.to, options.check)
        for line in lines:
            print(line, flush=True)
    except (ValueError, OSError) as error:
        return refuse(error)
    return 0


def export_of(options: argparse.Namespace) -> conversion.Written:
    """Return what is to be written of a run. Raises ValueError or OSError."""
    checkpoint = conversion.checkpoint_of(options.run, options.step)
    has_adapters = restore.read_meta(*checkpoint).base is not None
    if options.merge and not has_adapters:
        raise ValueError(f"--merge: {options.run} trained no adapters (train.lora); leave it out")
    kind = Adapters if has_adapters and not options.merge else conversion.Export
    return kind(*checkpoint, options.run, options.dtype)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. Exits with 2 on an error."""
    parser = Parser(
        prog="python -m nanotrain_jax.convert",
        description="Convert weights from and to model folders of Hugging Face.",
        usage="%(prog)s --from FOLDER --out RUN | --run RUN --to FOLDER [--step N] [--dtype DTYPE] [--merge] "
        "[--no-check]",
    )
    parser.add_argument("--from", dest="source", type=folder_argument, metavar="FOLDER", help="model folder to read")
    parser.add_argument("--out", type=folder_argument, metavar="RUN", help="folder of a run to write")
    parser.add_argument("--run", type=folder_argument, metavar="RUN", help="folder of a run to read (logging.dir)")
    parser.add_argument("--to", type=folder_argument, metavar="FOLDER", help="model folder to write")
    parser.add_argument("--step", type=at_least(0), help="step of the checkpoint to read (default: the newest)")
    dtypes = "bfloat16", "float32"
    parser.add_argument("--dtype", choices=dtypes, help="dtype to write (default: that in which the run computes)")
    parser.add_argument("--merge", action="store_true", help="write the base with the adapters added to it")
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not check what was written")
    options = parser.parse_args(argv)
    given = {name for name in ("source", "out", "run", "to") if getattr(options, name)}
    if given not in ({"source", "out"}, {"run", "to"}):
        parser.error("give --from FOLDER --out RUN, or --run RUN --to FOLDER")
    if options.source and (options.step is not None or options.dtype or options.merge):
        parser.error("--step, --dtype and --merge choose what to read of a run and how to write it: only with --run")
    return options


if __name__ == "__main__":
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax
    sys.exit(shell.run(main))
