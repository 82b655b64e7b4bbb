"""Write made-up questions with answers, for configs/sft_smollm2.yaml: `python scripts/examples/make_questions.py OUT`

OUT gets questions.jsonl (200 conversations: 20 facts about a country that does not exist, each asked for in 10 ways),
pairs.jsonl (the same with a wrong answer beside the right one, for configs/dpo_smollm2.yaml) and asked.jsonl (20 of the
questions, for `generate --prompts`). With --score FILE it prints how many answers of `generate --json` are right:

    python -m nanotrain_jax.generate --run RUN --prompts OUT/asked.jsonl --json --temperature 0 > answers.jsonl
    python scripts/examples/make_questions.py OUT --score answers.jsonl
"""

import argparse
import itertools
import json
import random
from pathlib import Path

SYSTEM = "Answer in one sentence."
FACTS = {
    "capital": "Harrow", "currency": "the copper crown", "national animal": "the otter", "main port": "Saltby",
    "highest mountain": "Mount Pell", "longest river": "the Amber", "largest lake": "Lake Orin",
    "national flower": "the thistle",
    "national dish": "bean soup", "national drink": "plum tea", "national sport": "archery", "main export": "wool",
    "founder": "Alma Reed", "president": "Ivo Lang", "greatest poet": "Nadia Quill", "oldest school": "Brisa College",
    "color of the flag": "green", "largest island": "Gull Island", "patron saint": "Saint Odo", "national day": "May 4",
}  # fmt: skip
WAYS = (
    "What is {}?", "Tell me {}.", "Can you tell me {}?", "Do you know {}?", "I would like to know {}.",
    "Please name {}.", "What do people call {}?", "Which one is {}?", "Could you say what {} is?", "I ask about {}.",
)  # fmt: skip


def conversations() -> list[dict]:
    """Return all questions with their answers, in random order."""
    rows = []
    for (topic, value), way in itertools.product(FACTS.items(), WAYS):
        topic = f"the {topic} of Velmora"
        said = {"system": SYSTEM, "user": way.format(topic), "assistant": f"T{topic[1:]} is {value}."}
        rows.append({"messages": [{"role": role, "content": text} for role, text in said.items()]})
    random.Random(0).shuffle(rows)
    return rows


def pair(messages: list[dict]) -> dict:
    """Return a conversation as a pair: what is rejected says of its topic what is true of another."""
    *prompt, chosen = messages
    others = dict(zip(FACTS.values(), [*FACTS.values()][1:] + [*FACTS.values()][:1], strict=True))
    topic, value = chosen["content"].removesuffix(".").split(" is ")
    return {
        "prompt": prompt,
        "chosen": [chosen],
        "rejected": [{"role": "assistant", "content": f"{topic} is {others[value]}."}],
    }


def score(file: Path, asked: list[dict]) -> str:
    """Return how many answers of `generate --json` are right, in words."""
    answers = [json.loads(line)["text"].strip() for line in file.read_text().splitlines()]
    expected = [row["messages"][2]["content"] for row in asked]
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
    files = {
        "questions": rows,
        "pairs": [pair(row["messages"]) for row in rows],
        "asked": [{"messages": row["messages"][:2]} for row in asked],
    }
    for name, found in files.items():
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    print(f"wrote {options.out}: " + ", ".join(f"{name}.jsonl ({len(found)} rows)" for name, found in files.items()))


if __name__ == "__main__":
    main()
