"""Tokens as text: complete characters, stops, and conversations by chat templates."""

import json

import pytest
from hugging_face_folders import write_json

from nanotrain_jax.data import chat_template
from nanotrain_jax.data.tokenizer import of_bytes
from nanotrain_jax.generation.engine import ENDED
from nanotrain_jax.generation.text import Text

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TALK = [{"role": "user", "content": "Hi"}]


def pieces(tokens, stops=()):
    text = Text(b"x", of_bytes(), stops)
    return [text.add([token]) for token in tokens] + [text.close()], text


def test_only_complete_characters_are_shown_and_the_end_token_stops():
    found, text = pieces([*"aé€".encode(), 0xFF, *b"b", 0xE2, 256, *b"never"])
    assert found[:10] == ["a", "", "é", "", "", "€", "", b"\\ufffdb".decode("unicode_escape"), "", "\ufffd"]
    assert "".join(found) == text.text == "aé€\ufffdb\ufffd"
    assert (text.is_ended, len(text.ids)) == (True, 9)
    assert pieces(b"ab")[0] == ["a", "b", ""]
    assert pieces([*b"ab", ENDED, ENDED])[1].text == "ab"


def test_a_stop_text_ends_before_it_and_no_part_of_it_is_shown():
    found, text = pieces(b"one\n\ntwo", stops=["\n\nt", "zzz"])
    assert "".join(found) == text.text == "one"
    assert found[:3] == ["o", "n", "e"]
    found, text = pieces(b"a\n\nb", stops=["\n\nt"])
    assert found == ["a", "", "", "\n\nb", ""]
    assert pieces(b"abcabd", stops=["abd", "cab"])[1].text == "ab"


@pytest.mark.parametrize("stops", [["c"], ["bcd", "c"], ["abd", "cab"], ["\u20ac"], ["zz"], []])
@pytest.mark.parametrize("end", [[256], [ENDED, ENDED], []])
def test_a_text_is_the_same_whichever_tokens_come_together(stops, end):
    tokens = [*"abcabd \u20acz".encode(), *end, *b"zcd" * bool(end)]
    _, alone = pieces(tokens, stops)
    for size in range(2, len(tokens) + 1):
        text = Text(b"x", of_bytes(), stops)
        shown = [text.add(tokens[at : at + size]) for at in range(0, len(tokens), size)] + [text.close()]
        assert "".join(shown) == text.text == alone.text
        assert (text.is_ended, text.ids) == (alone.is_ended, alone.ids)


def folder(path, config, template=None):
    path.mkdir(exist_ok=True)
    write_json(path / "tokenizer_config.json", config)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return chat_template.of_folder(path)


def test_a_conversation_is_rendered_by_the_template_of_the_folder(tmp_path):
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert folder(tmp_path, {"chat_template": CHATML}).render(TALK) == expected
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    assert folder(tmp_path, {"chat_template": several}).render(TALK) == expected
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "chat_template": "old"}
    text = "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'tool' %}\n  {% continue %}\n  {% endif %}\n"
    text += "{{ m | tojson }}{{ eos_token }}\n{%- endfor %}"
    shown = folder(tmp_path, tokens, text).render([*TALK, {"role": "tool", "content": ""}])
    assert shown == '<s>{"role": "user", "content": "Hi"}</s>'


BAD = {
    "{{ raise_exception('roles must alternate') }}": "refuses the conversation: roles must alternate",
    "{% for m in messages %}": "is damaged",
    "{{ messages.append(1) }}": "refuses the conversation",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "refuses the conversation",
    "{{ messages[0]['content'] + 1 }}": "refuses the conversation",
}


@pytest.mark.parametrize("template", BAD, ids=json.dumps)
def test_a_template_that_fails_or_reaches_out_is_refused(template, tmp_path):
    with pytest.raises(ValueError, match=BAD[template]):
        folder(tmp_path, {"chat_template": template}).render(TALK)


def test_a_folder_without_a_template_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no chat template"):
        chat_template.of_folder(tmp_path)
