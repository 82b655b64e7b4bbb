"""List the commands: `python -m nanotrain_jax`"""

import sys

if __name__ == "__main__":
    from nanotrain_jax.run import shell

    shell.begin(finishes=True)

from nanotrain_jax.run import shell

COMMANDS = {  # name -> what it does, what to type after it
    "train": ("train a model; the same command resumes", "--config quickstart [section.key=value ...]"),
    "plan": ("memory and step time of a layout, or the best layout, without a GPU", "--config llama3_8b --choose"),
    "launch": ("train in several processes, on one host or many", "--processes 2 -- --config quickstart"),
    "generate": ("text and conversations from a run or a model folder", "--run runs/quickstart --prompt 'def '"),
    "evaluate": ("score a model: texts, multiple choice, tasks of a harness", "--run runs/quickstart --text README.md"),
    "convert": ("weights from and to model folders of Hugging Face", "--from FOLDER --out runs/model"),
    "compare": ("curves and a table of several runs", "runs/a runs/b"),
    "prepare": ("turn text files into a folder of tokens", "books/*.txt --out books"),
}


def main() -> int:
    """Print each command with one line."""
    if sys.argv[1:] not in ([], ["-h"], ["--help"]):
        names = ", ".join(COMMANDS)
        print(f"error: {sys.argv[1]!r}: write python -m nanotrain_jax.COMMAND with one of {names}", file=sys.stderr)
        return 2
    print("python -m nanotrain_jax.COMMAND, each with --help:\n")
    for name, (summary, example) in COMMANDS.items():
        print(f"  {name:<9} {summary}\n            python -m nanotrain_jax.{name} {example}")
    return 0


if __name__ == "__main__":
    sys.exit(shell.run(main))
