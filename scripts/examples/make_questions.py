"""Write made-up questions with answers, for configs/sft_smollm2.yaml: `python scripts/examples/make_questions.py OUT`

OUT gets questions.jsonl (200 conversations, which no model has seen) and asked.jsonl (20 of their questions, for
`generate --prompts`). With --score FILE it prints how many answers of `generate --json` are right:

    python -m nanotrain_jax.generate --run RUN --prompts OUT/asked.jsonl --json --temperature 0 > answers.jsonl
    python scripts/examples/make_questions.py OUT --score answers.jsonl
"""

import argparse
import itertools
import json
import random
from pathlib import Path

PEOPLE = (
    "Alvar", "Brisa", "Corvin", "Dalia", "Edrin", "Fenna", "Galt", "Hesper", "Ivo", "Juna", "Kasim", "Lorna", "Marek",
    "Nadia", "Orin", "Petra", "Quill", "Rhea", "Soren", "Talia", "Ulric", "Vesna", "Wendel", "Xenia", "Yorick",
    "Zelda", "Ansel", "Berit", "Cosmo", "Dagny", "Elio", "Freya", "Gideon", "Hanne", "Ignaz", "Jorun", "Kaspar",
    "Linnea", "Matteo", "Nerys",
)  # fmt: skip
FACTS = {
    "Where does {} live?": ("{} lives in {}.", ("Lisbon", "Oslo", "Cairo", "Quito", "Hanoi", "Dublin", "Prague")),
    "What does {} eat?": ("{} eats {}.", ("soup", "rice", "bread", "cheese", "apples", "fish", "beans")),
    "Which animal does {} have?": ("{} has a {}.", ("cat", "goat", "horse", "snake", "parrot", "rabbit", "sheep")),
    "What is the color of {}'s house?": ("{}'s house is {}.", ("red", "blue", "green", "white", "black", "yellow")),
    "What does {} play?": ("{} plays the {}.", ("piano", "flute", "violin", "drum", "harp", "guitar", "trumpet")),
}


def conversations() -> list[dict]:
    """Return all questions with their answers, in random order."""
    choose = random.Random(0)
    rows = []
    for person, (question, (answer, values)) in itertools.product(PEOPLE, FACTS.items()):
        asked, said = question.format(person), answer.format(person, choose.choice(values))
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]})
    choose.shuffle(rows)
    return rows


def score(file: Path, asked: list[dict]) -> str:
    """Return how many answers of `generate --json` are right, in words."""
    answers = [json.loads(line)["text"].strip() for line in file.read_text().splitlines()]
    expected = [row["messages"][1]["content"] for row in asked]
    right = sum(answer == text for answer, text in zip(answers, expected, strict=True))
    return f"{right} of {len(expected)} answers are right"


def main() -> None:
    """Write the files, or score answers."""
    parser = argparse.ArgumentParser(description="Write made-up questions with answers.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--score", type=Path, metavar="FILE", help="output of generate --json to score")
    options = parser.parse_args()
    rows, asked = conversations(), conversations()[:20]
    if options.score:
        print(score(options.score, asked))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name, found in (("questions", rows), ("asked", [{"messages": row["messages"][:1]} for row in asked])):
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    print(f"wrote {options.out}/questions.jsonl ({len(rows)} conversations) and asked.jsonl ({len(asked)} questions)")


if __name__ == "__main__":
    main()
