"""What of a conversation is learned, token by token, for templates of published formats."""

import pytest
from chat_data import (
    CHATML,
    GEMMA,
    LLAMA3,
    MARKED,
    MISTRAL,
    QWEN,
    ROLES_ALONE,
    WITHOUT_THOUGHTS,
    load,
    marked,
    talk,
    write_rows,
    write_tokenizer,
)  # fmt: skip

TWO = talk("Hi", "Hello.", "Bye", "So long.")
WITH_SYSTEM = talk("system: Be brief.", "Hi", "Hello.")
LLAMA3_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
# Every token here is a byte or a special token.
GOLDEN = {
    "ChatML": (
        CHATML,
        {},
        TWO,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello.<|im_end|>]]\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[So long.<|im_end|>]]\n",
    ),
    "ChatML, system": (
        CHATML,
        {},
        WITH_SYSTEM,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[[Hello.<|im_end|>]]\n",
    ),
    "Llama 3": (
        LLAMA3,
        LLAMA3_TOKENS,
        TWO,
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello.<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[So long.<|eot_id|>]]",
    ),
    "Llama 3, system, white space around": (
        LLAMA3,
        LLAMA3_TOKENS,
        talk("system: Be brief.", " Hi\n", "\n Hello. "),
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello.<|eot_id|>]]",
    ),
    "Mistral": (
        MISTRAL,
        {"bos_token": "<s>", "eos_token": "</s>"},
        TWO,
        "<s>[INST] Hi [/INST][[ Hello.</s>]][INST] Bye [/INST][[ So long.</s>]]",
    ),
    "Qwen 2.5": (
        QWEN,
        {},
        TWO[:2],
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello.<|im_end|>]]\n",
    ),
    "Qwen 2.5, system": (
        QWEN,
        {},
        WITH_SYSTEM,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[[Hello.<|im_end|>]]\n",
    ),
    "Gemma": (
        GEMMA,
        {"bos_token": "<bos>", "eos_token": "<end_of_turn>"},
        TWO,
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n[[Hello.<end_of_turn>]]\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n[[So long.<end_of_turn>]]\n",
    ),
    "generation blocks": (
        MARKED,
        {},
        TWO,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello.<|im_end|>]]\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[So long.<|im_end|>]]\n",
    ),
    "the user speaks last, characters of several bytes, an end token within an answer": (
        CHATML,
        {},
        talk("é", "a<|im_end|>\n日", "Bye"),
        "<|im_start|>user\n\ufffd\ufffd<|im_end|>\n<|im_start|>assistant\n[[a<|im_end|>\n\ufffd\ufffd\ufffd<|im_end|>]]"
        "\n<|im_start|>user\nBye<|im_end|>\n",
    ),
}


def learned(tmp_path, template, row, tokens=None, merges=(), **keys):
    """-> the text of a row with marks, and lines about the data."""
    folder = write_tokenizer(tmp_path, template, merges, **(tokens or {}))
    dataset = load(write_rows(tmp_path / "rows.jsonl", row), folder, **keys)
    assert len(dataset.train) == 1
    return marked(dataset.train[0], folder), dataset.notes


@pytest.mark.parametrize("template, tokens, messages, golden", GOLDEN.values(), ids=GOLDEN)
def test_what_the_assistant_says_is_learned_with_its_end_token(template, tokens, messages, golden, tmp_path):
    found, (_, *warnings) = learned(tmp_path, template, {"messages": messages}, tokens)
    assert found == golden
    assert not warnings


HI, BYE = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>user\nBye<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
PARTS = {
    ("completion", "messages"): f"{HI}Hello.<|im_end|>\n{BYE}{ANSWER}[[So long.<|im_end|>]]\n",
    ("all", "messages"): f"{HI}Hello.<|im_end|>\n{BYE}{ANSWER}So long.<|im_end|>\n]]".replace("user", "[[user", 1),
    ("assistant", "lists"): f"{HI}Hello.<|im_end|>\n{BYE}{ANSWER}[[So long.<|im_end|>]]\n",
    ("assistant", "texts"): "2 + 2 =[[ 4<|im_end|>]]",
    ("completion", "texts"): "2 + 2 =[[ 4<|im_end|>]]",
    ("all", "texts"): "2[[ + 2 = 4<|im_end|>]]",
    ("assistant", "text"): "O[[nce.<|im_end|>]]",
    ("all", "ended"): "O[[nce.<|im_end|>]]",
}
ROWS = {
    "messages": {"messages": TWO, "id": 3},
    "lists": {"prompt": TWO[:3], "completion": TWO[3:]},
    "texts": {"prompt": "2 + 2 =", "completion": " 4"},
    "text": {"text": "Once."},
    "ended": {"text": "Once.<|im_end|>"},
}


@pytest.mark.parametrize("loss_on, row", PARTS)
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "blocks"])
def test_loss_on_chooses_what_is_learned(loss_on, row, template, tmp_path):
    found, (_, *warnings) = learned(tmp_path, template, ROWS[row], loss_on=loss_on)
    assert found == PARTS[loss_on, row]
    assert not warnings


def test_a_token_is_learned_if_it_begins_in_the_answer(tmp_path):
    merges = [("Ġ", "4"), ("e", "e")]
    row = {"prompt": "2 + 2 =", "completion": " 4, see"}
    assert learned(tmp_path, None, row, merges=merges)[0] == "2 + 2 =[[· 4·, s·ee·<|im_end|>]]"
    found, notes = learned(tmp_path, None, {"prompt": "2 + 2 = ", "completion": "4 e"}, merges=merges)
    assert found == "2 + 2 =· 4·[[ e<|im_end|>]]"
    assert "a token begins before the answer and reaches into it, and is not learned: in 1 of" in notes[1]


def test_answers_without_an_end_are_told(tmp_path):
    found, notes = learned(tmp_path, ROLES_ALONE, {"messages": TWO})
    assert found == "<|user|>\nHi<|assistant|>\n[[Hello.]]<|user|>\nBye<|assistant|>\n[[So long.]]"
    assert "without an end token behind the answer, so that nothing teaches to stop: 1 of" in notes[1]
    blocks = MARKED.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}")
    found, notes = learned(tmp_path, blocks, {"messages": TWO[:2]})
    assert found == f"{HI}[[Hello.]]<|im_end|>\n"
    assert "without an end token behind the answer" in notes[1]


def test_an_end_at_which_generation_does_not_stop_is_told(tmp_path):
    tokens = {"eos_token": "<|endoftext|>"}
    _, notes = learned(tmp_path, CHATML, {"messages": TWO}, tokens)
    assert "answers end with <|im_end|>, at which generated text does not stop" in notes[1]
    _, notes = learned(tmp_path, CHATML, {"messages": TWO}, tokens, end_token="<|im_end|>")
    assert len(notes) == 1


def test_a_template_whose_prefixes_do_not_nest_is_refused(tmp_path):
    thoughts = talk("Hi", "<think>Hm.</think>Hello.", "Bye", "<think>Oh.</think>So long.")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the chat template of .* once others follow \(messages\[1\]"):
        learned(tmp_path, WITHOUT_THOUGHTS, {"messages": thoughts})
    found, _ = learned(tmp_path, WITHOUT_THOUGHTS, {"messages": thoughts}, loss_on="completion")
    assert found == f"{HI}Hello.<|im_end|>\n{BYE}{ANSWER}[[<think>Oh.</think>So long.<|im_end|>]]\n"


def test_a_template_that_does_not_say_where_answers_begin_is_refused(tmp_path):
    without = CHATML[: CHATML.index("{% if")]
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the chat template of .* knows no add_generation_prompt"):
        learned(tmp_path, without, {"messages": TWO})


def test_dates_in_templates_are_the_same_on_every_day(tmp_path):
    dated = "{{ strftime_now('%d %b %Y') + '\\n' }}" + CHATML
    assert learned(tmp_path, dated, {"messages": TWO[:2]})[0] == f"26 Jul 2024\n{HI}[[Hello.<|im_end|>]]\n"
