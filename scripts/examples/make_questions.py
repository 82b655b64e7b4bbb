"""Write made-up questions with answers, for configs/sft_smollm2.yaml: `python scripts/examples/make_questions.py FOLDER`

FOLDER gets questions.jsonl (200 conversations, which no model has seen) and asked.jsonl (20 of their questions, for
`generate --prompts`). With --score FILE it prints how many answers of `generate --json` are right:

    python -m nanotrain_jax.generate --run RUN --prompts FOLDER/asked.jsonl --json --temperature 0 > answers.jsonl
    python scripts/examples/make_questions.py FOLDER --score answers.jsonl
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
        user = {"role": "user", "content": question.format(person)}
        rows.append(
            {"messages": [user, {"role": "assistant", "content": answer.format(person, choose.choice(values))}]}
        )
    choose.shuffle(rows)
    return rows


def main() -> None:
    """Write the files, or score answers."""
    parser = argparse.ArgumentParser(description="Write made-up questions with answers.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--score", type=Path, metavar="FILE", help="output of generate --json to score")
    options = parser.parse_args()
    rows = conversations()
    asked = rows[:20]
    if options.score:
        answers = [json.loads(line) for line in options.score.read_text().splitlines()]
        right = [
            given["text"].strip() == row["messages"][1]["content"] for given, row in zip(answers, asked, strict=True)
        ]
        print(f"{sum(right)} of {len(right)} answers are right")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, found in (("questions", rows), ("asked", [{"messages": row["messages"][:1]} for row in asked])):
        (options.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    print(
        f"wrote {options.folder}/questions.jsonl: {len(rows)} conversations; asked.jsonl: {len(asked)} of their questions"
    )


if __name__ == "__main__":
    main()
