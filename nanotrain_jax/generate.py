"""Generate text: `python -m nanotrain_jax.generate --run DIR | --hf FOLDER --prompt TEXT | --prompts FILE | --chat`

The model is laid out over all devices that are here, whatever the layout of its training; keys and values are cached
(generation/). Options left out come from the folder's generation_config.json. Exit codes: 0 done; 2 invalid request
(one line on stderr).
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanotrain_jax.run import shell

    shell.begin()
    shell.announce(sys.argv[1:], sys.stderr)

import argparse
import json
import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nanotrain_jax.config.load import Parser, at_least, folder_argument, refuse
from nanotrain_jax.data import chat_template
from nanotrain_jax.generation import load as models
from nanotrain_jax.generation import prompts
from nanotrain_jax.generation.engine import Choice
from nanotrain_jax.generation.load import Loaded
from nanotrain_jax.generation.prompts import Conversation, Prompt
from nanotrain_jax.generation.sampling import Sampling
from nanotrain_jax.generation.session import Session
from nanotrain_jax.generation.text import Text
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.run import shell

DEFAULTS = {"temperature": 0.8, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
TOKENS = 200
SHOWN = 40  # characters of a prompt in an error message


def main(argv: Sequence[str] | None = None) -> int:
    """Generate, or converse; an invalid request gives one line on stderr and exit code 2."""
    options = parse(argv)
    meshes.pin()
    try:
        folder = options.hf or options.run
        saved = models.generation_config(folder)
        how = sampling(options, saved)
        options.tokens, options.stop = options.tokens or tokens_of(saved), options.stop or stops_of(saved)
        template = chat_template.of_folder(folder) if options.chat else None
        loaded = load(options)
        given = [] if options.chat else prompts_of(options, loaded)
    except (ValueError, OSError) as error:
        return refuse(error)
    if ignored := models.not_computed(saved):
        print(f"not computed: {ignored} of {folder / models.GENERATION}", file=sys.stderr)
    sys.stdout.reconfigure(errors="replace")  # the terminal encoding may lack a character
    session = Session(loaded.engine, Choice(how, tuple(loaded.tokenizer.stops)), loaded.context)
    if template:
        converse(session, loaded, template, options)
    elif len(given) == 1 and not options.json and not options.prompts:
        stream(session, loaded, given[0], options)
    else:
        in_batches(session, loaded, given, options)
    if session.shifted:
        print(
            f"the text reached the context of {loaded.context} tokens, and continued with its last half",
            file=sys.stderr,
        )
    print(session.speed, file=sys.stderr)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. Exits with 2 on an error."""
    parser = Parser(prog="python -m nanotrain_jax.generate", description="Generate text with a trained model.")
    add_model(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", action="append", help="text to continue; may be repeated")
    what.add_argument(
        "--prompts", type=folder_argument, metavar="FILE", help='JSONL, rows of {"prompt"} or {"messages"}; JSONL out'
    )
    what.add_argument("--chat", action="store_true", help="converse: Ctrl-C ends an answer, Ctrl-D the conversation")
    parser.add_argument("--system", help="with --chat: the system prompt")
    parser.add_argument("--tokens", type=at_least(1), help=f"generate at most so many (default: {TOKENS})")
    parser.add_argument("--temperature", type=at_least(0, float), help="0: greedy (default: 0.8)")
    parser.add_argument("--top-k", type=at_least(1), help="sample from the k most likely (default: 50)")
    parser.add_argument("--top-p", type=share, help="sample from the most likely whose shares sum to p (default: 1)")
    parser.add_argument(
        "--min-p", type=share, help="only those at least p times as likely as the most likely (default: 0)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="random seed of the sampling (default: 0)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    parser.add_argument("--batch", type=at_least(1), default=8, help="prompts that run together (default: 8)")
    parser.add_argument("--json", action="store_true", help="JSON lines: prompt, text, tokens, is_ended")
    options = parser.parse_args(argv)
    check_model(parser, options)
    if options.system is not None and not options.chat:
        parser.error("--system is for --chat; remove it")
    return options


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a model and say where it runs."""
    parser.add_argument("--run", type=folder_argument, metavar="DIR", help="folder of a run (logging.dir)")
    parser.add_argument("--hf", type=folder_argument, metavar="FOLDER", help="or a model folder of Hugging Face")
    parser.add_argument("--step", type=at_least(0), help="step of the run's checkpoint (default: the newest)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and cache (default: bfloat16 on GPUs, else float32)",
    )
    parser.add_argument(
        "--tensor", type=at_least(1), help="devices that share each layer (default: as many as its heads allow)"
    )


def check_model(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with 2 unless exactly one model is named."""
    if (options.run is None) == (options.hf is None):
        parser.error("give one of --run DIR and --hf FOLDER")
    if options.hf and options.step is not None:
        parser.error("--step is for --run; a model folder has no steps")


def share(text: str) -> float:
    """Return a share above 0, at most 1 (for `type=`). Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, at most 1")
    return value


def load(options: argparse.Namespace) -> Loaded:
    """Load the model. Raises ValueError or OSError."""
    placement = models.Placement(options.tensor, options.dtype)
    return (
        models.of_folder(options.hf, placement) if options.hf else models.of_run(options.run, options.step, placement)
    )


def sampling(options: argparse.Namespace, saved: dict[str, Any]) -> Sampling:
    """Return how tokens are chosen: by options, else by generation_config.json, else by default. Raises ValueError."""
    values = DEFAULTS | {name: saved[name] for name in DEFAULTS if saved.get(name) is not None}
    if saved.get("do_sample") is False:
        values["temperature"] = 0.0
    values |= {name: value for name in DEFAULTS if (value := getattr(options, name)) is not None}
    wrong = {name: value for name, value in values.items() if type(value) not in (int, float) or value < 0}
    for name, value in wrong.items():
        raise ValueError(f"{models.GENERATION} says {name}={value!r}, not a number from 0; mend it, or give the option")
    return Sampling(**values | {"top_k": int(values["top_k"]) or None}, seed=options.seed)


def tokens_of(saved: dict[str, Any]) -> int:
    """Return how many tokens generation_config.json allows, else the default. Raises ValueError."""
    count = saved.get("max_new_tokens")
    if count is not None and (type(count) is not int or count < 1):
        raise ValueError(f"{models.GENERATION} says max_new_tokens={count!r}, not a number from 1; mend it")
    return count or TOKENS


def stops_of(saved: dict[str, Any]) -> list[str]:
    """Return the texts at which generation_config.json ends texts. Raises ValueError."""
    given = saved.get("stop_strings") or []
    stops = [given] if isinstance(given, str) else given
    if not (isinstance(stops, list) and all(isinstance(stop, str) for stop in stops)):
        raise ValueError(f"{models.GENERATION} says stop_strings={given!r}, not a list of texts; mend it")
    return stops


def prompts_of(options: argparse.Namespace, loaded: Loaded) -> list[Prompt]:
    """Return the prompts of the options. Raises ValueError or OSError."""
    if options.prompts:
        return prompts.read(options.prompts, loaded)
    return [prompts.encode(text, loaded, f"--prompt={text[:SHOWN]!r}", {"prompt": text}) for text in options.prompt]


def stream(session: Session, loaded: Loaded, prompt: Prompt, options: argparse.Namespace) -> None:
    """Print a prompt and its continuation, as it comes."""
    print(prompt.given["prompt"], end="", flush=True)
    for text in pieces(session, Text(prompt.ids, loaded.tokenizer, options.stop), options.tokens):
        print(text, end="", flush=True)
    print()


def pieces(session: Session, text: Text, limit: int) -> Iterator[str]:
    """Yield the continuation of a text as it comes."""
    session.feed([text.prompt])
    for new_1n in session.tokens(limit):
        yield text.add(new_1n[0].tolist())
        if text.is_ended:
            return
    yield text.close()


def in_batches(session: Session, loaded: Loaded, given: list[Prompt], options: argparse.Namespace) -> None:
    """Print the continuation of each prompt, in order: as JSON lines, or with its prompt."""
    found: dict[int, str] = {}
    for rows in prompts.batches(given, options.batch):
        chosen = [given[i] for i in rows]
        for i, answer in zip(rows, prompts.answers(session, loaded, chosen, options.tokens, options.stop), strict=True):
            is_json = options.json or options.prompts
            as_json = json.dumps(given[i].given | answer._asdict(), ensure_ascii=False)
            found[i] = as_json if is_json else given[i].given["prompt"] + answer.text
    for i in range(len(given)):
        print(found[i])


def converse(session: Session, loaded: Loaded, template: chat_template.Template, options: argparse.Namespace) -> None:
    """Converse on the terminal, until the end of input. What is in the cache is not computed again."""
    conversation, forgotten = Conversation(loaded, template, options.system), 0
    while (line := asked()) is not None:
        try:
            prompt = conversation.ask(line) if line.strip() else None
        except ValueError as error:
            refuse(error)
            continue
        if conversation.forgotten > forgotten:
            forgotten = conversation.forgotten
            print(f"longer than the context: the first {forgotten} exchanges are forgotten", file=sys.stderr)
        if prompt:
            conversation.answer(shown(session, Text(prompt.ids, loaded.tokenizer, options.stop), options.tokens))


def shown(session: Session, text: Text, limit: int) -> str:
    """Print an answer as it comes, until Ctrl-C -> its text."""
    with interruptible() as interrupted:
        for piece in pieces(session, text, limit):
            print(piece, end="", flush=True)
            if interrupted:
                break
    print(flush=True)
    return text.text


def asked() -> str | None:
    """Return a line of the user; None at the end of input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            print(end="\n" if sys.stdin.isatty() else "")
            return None
        except KeyboardInterrupt:
            print("\nCtrl-D ends the conversation", file=sys.stderr)


@contextmanager
def interruptible() -> Iterator[list]:
    """Yield a list that is empty until Ctrl-C, which then does nothing else."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax
    sys.exit(shell.run(main))
