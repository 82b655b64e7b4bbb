"""Begin tokens: what a tokenizer puts before a text begins each document, each row of text and each prompt, once."""

import hashlib
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from chat_data import LLAMA3, talk
from conftest import exit_code, small
from tokenizers.processors import BertProcessing, ByteLevel, RobertaProcessing, Sequence, TemplateProcessing

from nanotrain_jax import prepare, train
from nanotrain_jax.checkpoint import compatibility
from nanotrain_jax.config import load as request
from nanotrain_jax.data import batches, corpus, tokenizer
from nanotrain_jax.evaluation import scoring, text
from nanotrain_jax.generation import load as models
from nanotrain_jax.generation import prompts
from nanotrain_jax.generation.text import Text

TOKENS = {"<pad>": 0, "<s>": 1, "</s>": 2, "<x>": 3, "la": 4, "mi": 5}
S, END, X, LA, MI = 1, 2, 3, 4, 5


def template(single, *special):
    return TemplateProcessing(single=single, special_tokens=[(token, TOKENS[token]) for token in special])


ADDS = template("<s> $A", "<s>")
SAYS = {"add_bos_token": True, "bos_token": "<s>"}


@pytest.fixture
def folder(tmp_path):
    """Write tokenizer.json with a post-processor, and tokenizer_config.json -> the folder."""

    def write(processor=None, path=tmp_path, **config):
        path.mkdir(exist_ok=True)
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(TOKENS, unk_token="<pad>"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        model.add_special_tokens(["<pad>", "<s>", "</s>", "<x>"])
        if processor is not None:
            model.post_processor = processor
        model.save(str(path / "tokenizer.json"))
        if config:
            (path / "tokenizer_config.json").write_text(json.dumps(config))
        return path

    return write


READ = {
    "none": (None, {}, None, ()),
    "white space": (ByteLevel(), {"bos_token": "<s>"}, None, ()),
    "a template": (ADDS, {}, None, (S,)),
    "Llama 3": (Sequence([ByteLevel(), ADDS]), {"bos_token": "<s>"}, None, (S,)),
    "behind the text too": (template("<s> $A </s>", "<s>", "</s>"), {}, None, (S,)),
    "behind the text alone": (template("$A </s>", "</s>"), {}, None, ()),
    "RoBERTa": (RobertaProcessing(("</s>", END), ("<s>", S)), {}, None, (S,)),
    "BERT": (BertProcessing(("</s>", END), ("<x>", X)), {}, None, (X,)),
    "two": (template("<x> <s> $A", "<x>", "<s>"), {}, None, (X, S)),
    "the config": (None, SAYS, None, (S,)),
    "the config, an object": (None, {"add_bos_token": True, "bos_token": {"content": "<s>"}}, None, (S,)),
    "the config says false": (ADDS, {"add_bos_token": False, "bos_token": "<s>"}, None, ()),
    "the config has another": (ADDS, {"add_bos_token": True, "bos_token": "<x>"}, None, (X,)),
    "the config has no token": (ADDS, {"add_bos_token": True, "bos_token": None}, None, (S,)),
    "ours": (None, {}, "<x>", (X,)),
    "ours, of the text": (None, {}, "la", (LA,)),
    "ours instead": (ADDS, SAYS, "<x>", (X,)),
    "ours instead of an unknown one": (None, {"add_bos_token": True, "bos_token": "<y>"}, "<x>", (X,)),
    "ours: none": (ADDS, {}, "none", ()),
    "ours: none instead of two": (template("<x> <s> $A", "<x>", "<s>"), {}, "none", ()),
}


@pytest.mark.parametrize("processor, config, asked, begin", READ.values(), ids=READ)
def test_the_begin_token_is_what_the_files_put_before_a_text(processor, config, asked, begin, folder, tmp_path):
    path = folder(processor, **config)
    found = tokenizer.load(str(path), begin_token=asked)
    assert found.begin == begin
    if asked is None and "add_bos_token" not in config:
        model = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        assert model.encode("la").ids[: len(begin) + 1] == [*begin, LA]
    assert found.begun(np.array([LA])).tolist() == ([LA] if begin == (LA,) else [*begin, LA])
    assert found.begun(np.array([*begin, LA])).tolist() == [*begin, LA]
    digest = hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest()[:16]
    assert found.name == f"sha256:{digest}" + (" begin " + " ".join(map(str, begin)) if begin else "")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in found.files.items():
        (copy / name).write_text(content)
    again = tokenizer.load(str(copy))
    assert (again.name, again.begin, again.end) == (found.name, begin, found.end)
    if asked is None:
        assert found.files.get("tokenizer_config.json") == (json.dumps(config) if config else None)  # as it came


BAD = [
    (
        None,
        {"add_bos_token": True, "bos_token": "<y>"},
        None,
        "'<y>' is not a token of .*; set data.begin_token to one",
    ),
    (None, {}, "<y>", "begin token '<y>' is not a token of"),
    (TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 99)]), {}, None, "99 is not a token of"),
    (None, {"add_bos_token": "yes", "bos_token": "<s>"}, None, "add_bos_token='yes' with bos_token='<s>' .*; mend"),
    (None, {"add_bos_token": True, "bos_token": 1}, None, "add_bos_token=True with bos_token=1 .*; mend"),
]


@pytest.mark.parametrize("processor, config, asked, message", BAD)
def test_a_begin_token_that_is_none_is_refused(processor, config, asked, message, folder):
    with pytest.raises(ValueError, match=message):
        tokenizer.load(str(folder(processor, **config)), begin_token=asked)


def test_bytes_have_no_begin_token():
    assert tokenizer.load("bytes", begin_token="none").begin == ()
    with pytest.raises(ValueError, match="'<s>' is not one of bytes"):
        tokenizer.load("bytes", begin_token="<s>")


def opened(path, **keys):
    tree = {"tokenizer": str(path), "val_fraction": 0.0, "seq_len": 8, **keys}
    return batches.load(request.parse({"data": tree}).data)


def test_a_document_begins_with_it_once_and_is_known_by_its_text(folder):
    path = folder(ADDS)
    texts = [b"la mi", b"<s> mi", b"<pad>"]
    begun, without = (corpus.build(texts, tokenizer.load(str(path), begin_token=asked)) for asked in (None, "none"))
    assert begun.tokens.tolist() == [S, LA, MI, END, S, MI, END, S, 0, END]
    assert without.tokens.tolist() == [LA, MI, END, S, MI, END, 0, END]
    assert begun.keys.tolist() == without.keys.tolist()
    assert begun.fingerprint != without.fingerprint


@pytest.mark.parametrize("apart", [False, True])
def test_it_belongs_to_its_document_and_is_learned_only_after_another(apart, folder, tmp_path):
    path = folder(ADDS)
    (tmp_path / "texts.jsonl").write_text('{"text": "la mi la"}\n{"text": "mi"}\n')
    source = f"text:{tmp_path}/texts.jsonl"
    dataset = opened(path, source=source, seq_len=7, attend_across_documents=not apart)
    rows = batches.WithDocuments(dataset.train) if apart else dataset.train
    row = {name: x[0].tolist() for name, x in batches.rows_of(rows[0][None], None).items()}
    assert row["inputs"] == [S, LA, MI, LA, END, S, MI]
    assert row["targets"] == [LA, MI, LA, END, -1 if apart else S, MI, END]
    assert not apart or row["starts"] == [0] * 5 + [5] * 2


def learned(source, path, **keys):
    """The tokens of a row of examples, and those that are learned."""
    (row,) = opened(path, source=source, pack="none", **keys).train
    stop = int(row["starts"].max()) or len(row["inputs"])
    return row["inputs"][:stop].tolist(), row["targets"][row["targets"] >= 0].tolist()


def test_rows_of_texts_begin_with_it_and_those_of_templates_as_these_write(folder, tmp_path):
    path = folder(ADDS, bos_token="<s>", eos_token="</s>", chat_template="{{ messages[0].content + ' mi </s>' }}")
    file = tmp_path / "rows.jsonl"

    def rows(kind="chat", **row):
        file.write_text(json.dumps(row) + "\n")
        return f"{kind}:{file}"

    assert learned(rows(text="la mi"), path) == ([S, LA, MI, END], [LA, MI, END])
    assert learned(rows(text="<s> mi"), path) == ([S, MI, END], [MI, END])
    assert learned(rows(prompt="la", completion=" mi"), path) == ([S, LA, MI, END], [MI, END])
    assert learned(rows(prompt="la", completion=" mi"), path, loss_on="all") == ([S, LA, MI, END], [LA, MI, END])
    assert learned(rows(text="la mi"), path, begin_token="none") == ([LA, MI, END], [MI, END])
    asked = [{"role": "user", "content": "la"}]
    assert learned(rows(messages=asked), path, loss_on="all") == ([LA, MI, END], [MI, END])
    (row,) = opened(path, source=rows("pairs", prompt="la", chosen=" mi", rejected=" la")).train
    assert row["inputs"].tolist() == [S, LA, MI, END, S, LA, LA, END]
    assert row["targets"].tolist() == [-1, MI, END, -1, -1, LA, END, -1]


def loaded(path):
    return SimpleNamespace(tokenizer=tokenizer.load(str(path)), context=64, folder=path)


def test_training_generation_and_evaluation_read_a_text_alike(folder, tmp_path):
    path = folder(ADDS, bos_token="<s>", chat_template=LLAMA3)
    found = loaded(path)
    (tmp_path / "a.txt").write_text("la mi la")
    trained = corpus.build([b"la mi la"], found.tokenizer).tokens.tolist()[:-1]
    assert prompts.encode("la mi la", found, "", {}).ids == trained == [S, LA, MI, LA]
    (sample,) = text.samples(f"{tmp_path}/a.txt", found, None, None)
    assert [(request.tokens, request.count) for request in sample.requests] == [(trained, 3)]
    pairs = [("la ", "mi la"), ("", "la mi"), ("<s> la", " mi"), (" ", "la"), ("", "<s> la")]
    assert scoring.encoded(found.tokenizer, pairs) == [
        ([S, LA], [MI, LA]),
        ([S], [LA, MI]),
        ([S, LA], [MI]),
        ([S], [LA]),
        ([S], [LA]),
    ]
    assert prompts.encode("", found, "", {}).ids == [S]
    assert prompts.encode("<s> la", found, "", {}).ids == [S, LA]
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": talk("la")}) + '\n{"prompt": "la"}\n')
    rendered, plain = prompts.read(tmp_path / "asked.jsonl", found)
    assert (rendered.ids[0], rendered.ids.count(S), plain.ids) == (S, 1, [S, LA])
    shown = Text(plain.ids, found.tokenizer)
    assert (shown.add([MI, S, LA, END]), shown.is_ended) == (" mi la", True)


def test_a_prompt_of_several_begin_tokens_is_not_scored(folder, tmp_path):
    found = loaded(folder(template("<x> <s> $A", "<x>", "<s>")))
    (tmp_path / "a.txt").write_text("la mi la")
    (sample,) = text.samples(f"{tmp_path}/a.txt", found, None, None)
    assert [(request.tokens, request.count) for request in sample.requests] == [([X, S, LA, MI, LA], 3)]


def prepared(path, out, *options):
    files = [path / f"{i}.txt" for i in range(30)]
    for i, file in enumerate(files):
        file.write_text("la mi " * (i + 1))
    return exit_code(prepare.main, [*map(str, files), "--out", str(out), "--workers", "1", *options])


def test_a_token_folder_tells_its_begin_token(folder, tmp_path, capsys):
    path, tokens = folder(ADDS, path=tmp_path / "model"), tmp_path / "tokens"
    source = {"source": f"tokens:{tokens}", "tokenizer": None}
    assert prepared(path, tokens, "--tokenizer", str(path)) == 0
    assert "begin 1" in capsys.readouterr().out
    row = opened(None, **source | {"pack": "best_fit"}).train[0]
    assert row["inputs"][0] == S
    with pytest.raises(ValueError, match=r"data.begin_token='none' is not the tokenizer of .* begin 1\); remove"):
        opened(None, **source, begin_token="none")
    shutil.rmtree(tokens)
    assert prepared(path, tokens, "--tokenizer", str(path), "--begin-token", "none") == 0
    assert S not in opened(None, **source).train.slice(0, 1 << 20)
    with pytest.raises(ValueError, match=r"data.begin_token='<s>' is not the tokenizer of"):
        opened(None, **source, begin_token="<s>")


def test_a_token_folder_of_an_older_version_is_used_as_it_is_only_when_asked(folder, tmp_path, capsys):
    path, tokens = folder(ADDS, path=tmp_path / "model"), tmp_path / "tokens"
    source = {"source": f"tokens:{tokens}", "tokenizer": None}
    prepared(path, tokens, "--tokenizer", str(path), "--begin-token", "none")
    (tokens / "tokenizer_config.json").unlink()  # as older versions wrote it
    with pytest.raises(ValueError, match=r"without the begin token .* prepare it again, or set data.begin_token=none"):
        opened(None, **source)
    assert S not in opened(None, **source, begin_token="none").train.slice(0, 1 << 20)
    assert exit_code(prepare.main, ["--verify", str(tokens)]) == 0
    (tmp_path / "more.txt").write_text("mi " * 50)
    append = [str(tmp_path / "more.txt"), "--out", str(tokens), "--append"]
    capsys.readouterr()
    assert exit_code(prepare.main, append) == 2
    assert f"add --tokenizer {tokens} --begin-token none" in capsys.readouterr().err
    assert exit_code(prepare.main, [*append, "--tokenizer", str(tokens), "--begin-token", "none"]) == 0
    assert S not in opened(None, **source).train.slice(0, 1 << 20)


def test_checkpoints_with_and_without_it_are_told_apart(folder, tmp_path):
    path = folder(ADDS)
    begun, without = (tokenizer.load(str(path), begin_token=asked) for asked in (None, "none"))
    tokenizer.check_name(begun, begun.name, path)
    with pytest.raises(ValueError, match=r'no begin token came before its texts; write "add_bos_token": false into'):
        tokenizer.check_name(begun, without.name, path)
    with pytest.raises(ValueError, match="it was modified"):
        tokenizer.check_name(without, begun.name, path)
    folder(ADDS, add_bos_token=False)
    tokenizer.check_name(tokenizer.load(str(path)), without.name, path)
    meta = SimpleNamespace(weights_only=False, tokenizer=without.name)
    with pytest.raises(ValueError, match=r"resume with the same tokenizer \(data.begin_token: none\), or start again"):
        compatibility.check(meta, None, None, begun.name)
    meta.tokenizer = begun.name
    with pytest.raises(ValueError, match=r"\(data.begin_token: the token of id 1\)"):
        compatibility.check(meta, None, None, without.name)
    with pytest.raises(ValueError, match="the same tokenizer, or"):
        compatibility.check(meta, None, None, "bytes")


def test_a_run_keeps_the_rule_when_it_is_moved_and_does_not_resume_with_another(folder, tmp_path, capsys):
    path = folder(ADDS, path=tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join("la " * (i % 7) + "mi " * (i % 5) for i in range(900)))
    keys = {"tokenizer": str(path), "source": f"text:{tmp_path}/text.txt", "begin_token": "<x>"}
    tree = small(data=keys, train={"steps": 1}, logging={"dir": str(tmp_path / "run")}, runtime={"simulate": 8})
    tree["parallel"], tree["checkpoint"] = {"data": 1}, {"dir": str(tmp_path / "run" / "checkpoints")}
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    command = ["--config", str(tmp_path / "run.yaml"), "train.steps=2"]
    assert train.main(command[:2]) == 0
    capsys.readouterr()
    assert exit_code(train.main, [*command, "data.begin_token=none"]) == 2
    assert "resume with the same tokenizer (data.begin_token: the token of id 3)" in capsys.readouterr().err
    shutil.rmtree(path)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert models.tokenizer_of(moved, request.load(moved / "config.yaml")).begin == (X,)
