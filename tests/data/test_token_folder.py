"""Token folders of the second format: the same bytes however they are written, rows as of one corpus, damage."""

import json
import multiprocessing
import os
import resource
import signal
import time

import first_format
import numpy as np
import pytest
from conftest import cover, exit_code

from nanotrain_jax import prepare
from nanotrain_jax.config import load as request
from nanotrain_jax.data import batches, corpus, shards, spans, token_folder
from nanotrain_jax.data.tokenizer import of_bytes

DOCUMENTS = [f"document {i} says {'la ' * (i % 17 + 3)}\n" for i in range(900)]
SECOND = [f"another {i} says {'mi ' * (i % 13 + 3)}\n" for i in range(500)]
NUM_SHARDS = 12


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of a few thousand bytes of input, in this process."""
    monkeypatch.setattr(spans, "LEAST", 4096)


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def files(tmp_path):
    """A file of .jsonl, and some documents of text."""
    paths = [jsonl(tmp_path / "a.jsonl", DOCUMENTS[:700])]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(DOCUMENTS[700:]):
        paths.append(tmp_path / "texts" / f"{i:03}.txt")
        paths[-1].write_text(text)
    return paths


def run(*arguments):
    return prepare.main(["--workers", "1", *map(str, arguments)])


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def opened(folder, seq_len=16, **keys):
    return batches.load(request.parse({"data": {"source": f"tokens:{folder}", "seq_len": seq_len} | keys}).data)


@pytest.fixture
def folder(tmp_path, files, small_shards):
    assert run(*files, "--out", tmp_path / "tokens", "--val-fraction", 0.2) == 0
    return tmp_path / "tokens"


def as_one_corpus(folder):
    """Return the tokens and document ends of each side of a folder, from its documents' texts."""
    header, mapped = token_folder.read(folder, "full")
    assert len(mapped) >= NUM_SHARDS
    texts = {corpus.text_key(text.encode()): text.encode() for text in DOCUMENTS + SECOND}
    found = [[], []]
    for shard in mapped:
        for key in map(int, shard.keys):
            found[key < header.held_out_below].append(texts[key])
    assert len(found[0]) + len(found[1]) == header.total("documents")
    return [corpus.build(side, of_bytes()) for side in found]


def test_rows_and_document_starts_are_those_of_one_corpus(folder):
    dataset = opened(folder)
    for side, expected in zip((dataset.train, dataset.val), as_one_corpus(folder), strict=True):
        windows = batches.Windows(expected, np.arange(len(expected.ends)), 16)
        assert len(side) == len(windows)
        for i in range(len(windows)):
            np.testing.assert_array_equal(side[i], windows[i])
            np.testing.assert_array_equal(side.document_starts(i), windows.document_starts(i))
        np.testing.assert_array_equal(side.slice(3, 9000), windows.slice(3, 9000))
    everything = opened(folder, val_fraction=0)
    assert everything.train.total == dataset.train.total + dataset.val.total
    assert not len(everything.val)
    assert "document" in batches.first_words(dataset, request.parse({"data": {"source": f"tokens:{folder}"}}).data)


def test_held_out_texts_are_in_no_training_row_also_after_an_append(folder, tmp_path):
    held_out = set()
    for texts in DOCUMENTS, SECOND + DOCUMENTS[::3]:
        if texts is not DOCUMENTS:
            more = jsonl(tmp_path / "b.jsonl", texts)
            assert run(more, "--out", folder, "--append") == 0
            before = content(folder)
            assert run(more, "--out", folder, "--append") == 0  # the files are there already
            assert content(folder) == before
        header, mapped = token_folder.read(folder, "full")
        sides = [set(), set()]
        for shard in mapped:
            counts = shard.counts
            first = counts.documents - counts.held_out_documents
            sides[0].update(map(int, shard.keys[:first]))
            sides[1].update(map(int, shard.keys[first:]))
        assert not sides[0] & sides[1]
        assert held_out <= sides[1]
        held_out = sides[1]
        dataset = opened(folder)
        assert dataset.train.total == header.total("tokens") - header.total("held_out_tokens")
        rows = dataset.train.slice(0, dataset.train.total).astype(np.uint8).tobytes()
        texts = {corpus.text_key(text.encode()): text.encode() for text in DOCUMENTS + SECOND}
        assert not [texts[key] for key in held_out if b"\0" + texts[key] + b"\0" in b"\0" + rows]  # 256 is 0 in a byte
        assert 0.1 < header.total("held_out_tokens") / header.total("tokens") < 0.3


def test_parts_give_the_same_bytes(folder, files, tmp_path, capsys):
    for part in 2, 0, 1:
        assert run(*files, "--val-fraction", 0.2, "--out", tmp_path / "parts", "--part", f"{part}/3") == 0
        assert ("the other parts write the rest" in capsys.readouterr().out) == (part != 1)
    assert content(tmp_path / "parts") == content(folder)


def test_a_preparation_goes_on_where_it_stopped(folder, files, tmp_path, small_shards, capsys):
    expected = content(folder)
    arguments = [*files, "--val-fraction", 0.2, "--out", tmp_path / "again"]
    written, plain = [], shards.write

    def failing(place, *rest):
        if place.number == 5:
            raise OSError("No space left on device")
        written.append(place.number)
        return plain(place, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "write", failing)
        assert run(*arguments) == 2
    assert capsys.readouterr().err == "error: No space left on device\n"
    assert written == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"is not finished; give the same .*prepare command again"):
        opened(tmp_path / "again")
    assert run(*arguments, "--field", "content") == 2
    assert "another preparation of it is not finished" in capsys.readouterr().err
    flip(tmp_path / "again" / "00001.tokens", -1)
    (tmp_path / "again" / "00003.documents").write_bytes(b"")
    assert run(*arguments) == 0
    assert "kept 3 shards" in capsys.readouterr().out
    assert content(tmp_path / "again") == expected


@pytest.mark.parametrize("room", [4000, -1])
def test_on_a_full_disk_it_is_one_line_and_what_is_finished_stays(room, files, tmp_path, small_shards, capsys):
    assert run(files[0], "--out", tmp_path / "whole") == 0
    arguments = files[0], "--out", tmp_path / "full"
    most = max(path.stat().st_size for path in (tmp_path / "whole").glob("*.tokens"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room % most, before[1]))  # no file can be larger: a write fails
    try:
        assert run(*arguments) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert "full cannot be written (File too large); make room and give the same command again" in told.err
    assert not list(tmp_path.glob("full/*.partial"))
    assert run(*arguments) == 0
    assert ("shards that were finished before" in capsys.readouterr().out) == (room < 0)
    assert content(tmp_path / "full") == content(tmp_path / "whole")


def test_two_writers_of_a_folder(files, tmp_path, small_shards, capsys):
    from nanotrain_jax.data import preparation

    (tmp_path / "out").mkdir()
    with preparation.alone(tmp_path / "out", (0, 1)):
        plan = preparation.plan_of(preparation.Asked(files, "text", 0.05, of_bytes()))
        preparation.begin(tmp_path / "out", plan, of_bytes())
        before = content(tmp_path / "out")
        assert run(*files, "--out", tmp_path / "out") == 2
        assert content(tmp_path / "out") == before
    assert "is being written by another process" in capsys.readouterr().err


def flip(path, at):
    found = bytearray(path.read_bytes())
    found[at] ^= 1
    path.write_bytes(found)


def swap(folder, one, two):
    (folder / one).rename(folder / "aside")
    (folder / two).rename(folder / one)
    (folder / "aside").rename(folder / two)


def other_tokenizer(folder):
    path = folder / "00001.tokens"
    path.write_bytes(path.read_bytes().replace(b", bytes", b", other"))


def changed_header(folder):
    text = (folder / "header.json").read_text()
    (folder / "header.json").write_text(text.replace('"tokenizer": "bytes"', '"tokenizer": "other"'))


DAMAGE = {
    "truncated": (lambda f: os.truncate(f / "00003.tokens", 5000), "00003.tokens has 5,000 bytes, but must have"),
    "missing": (lambda f: (f / "00003.documents").unlink(), "00003.documents is missing"),
    "swapped": (lambda f: swap(f, "00001.tokens", "00002.tokens"), "00001.tokens "),
    "of another shard": (lambda f: flip(f / "00001.documents", 50), "it is another shard's, or of another tokenizer"),
    "another tokenizer": (other_tokenizer, "', but must begin with '.*, bytes': it is another shard's"),
    "json": (lambda f: flip(f / "00000.json", 40), "00000.json does not match header.json: it was modified"),
    "header": (changed_header, "does not match its SHA-256: it was modified"),
    "no header": (lambda f: (f / "header.json").write_text("{"), "is damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("verify", ["sample", "off"])
def test_a_damaged_folder_is_refused_in_one_line(case, verify, folder):
    damage, message = DAMAGE[case]
    if case == "json" and verify == "off":
        return
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        opened(folder, verify=verify)
    assert "\n" not in str(error.value)


def test_a_changed_tokenizer_of_a_folder_is_refused_in_one_line(tmp_path):
    (tmp_path / "text.txt").write_text("some words, and some more words\n" * 200)
    words = "--tokenizer", "train-bpe:270", "--out", str(tmp_path / "tokens"), "--workers", "1", "--val-fraction", "0"
    assert prepare.main([str(tmp_path / "text.txt"), *words]) == 0
    opened(tmp_path / "tokens", val_fraction=0)
    path = tmp_path / "tokens" / "tokenizer.json"
    good = path.read_text()
    other = good.replace('"add_prefix_space": false', '"add_prefix_space": true').replace('e":false', 'e":true')
    assert other != good
    for bad, message in ((other, "is not of the tokenizer of"), (good[:-9], "is not a tokenizer.json")):
        path.write_text(bad)
        with pytest.raises(ValueError, match=message) as error:
            opened(tmp_path / "tokens", val_fraction=0)
        assert "\n" not in str(error.value)


def test_checksums_are_verified_whole_sampled_or_not(folder, monkeypatch):
    flip(folder / "00003.tokens", -1)
    opened(folder, verify="off")
    for verify in "sample", "full", True:  # shards here have one block
        with pytest.raises(ValueError, match=r"00003.tokens does not match its SHA-256: it was modified; copy"):
            opened(folder, verify=verify)
    monkeypatch.setattr(token_folder, "SAMPLED", 1)
    outcomes = set()
    for _ in range(1000):  # one shard at a time: of twelve, never the damaged one has a chance of 1e-38
        try:
            opened(folder, verify="sample")
            outcomes.add("intact")
        except ValueError:
            outcomes.add("damaged")
        if len(outcomes) == 2:
            return
    raise AssertionError(f"all starts verified the same shard, or none: {outcomes}")


def test_verify_reads_all_and_tells_a_line_for_each_bad_shard(folder, capsys):
    assert prepare.main(["--verify", str(folder)]) == 0
    assert "shards are as they were written" in capsys.readouterr().out
    for name in "00003.tokens", "00005.documents":
        flip(folder / name, -1)
    (folder / "00007.json").unlink()
    os.truncate(folder / "00009.tokens", 5000)
    assert prepare.main(["--verify", str(folder)]) == 1
    told = capsys.readouterr()
    for line, message in zip(
        told.err.splitlines(),
        (
            "00003.tokens does not match its SHA-256",
            "00005.documents does not match its SHA-256",
            "00007.json is missing",
            "00009.tokens has 5,000 bytes",
        ),
        strict=True,
    ):
        assert message in line
    assert ": 4 of " in told.out


def test_verify_refuses_what_is_no_folder_and_finds_another_tokenizer(files, tmp_path, small_shards, capsys):
    assert run(*files, "--out", tmp_path / "bpe", "--tokenizer", "train-bpe:300") == 0
    assert prepare.main(["--verify", str(tmp_path / "bpe")]) == 0
    text = (tmp_path / "bpe" / "tokenizer.json").read_text()
    (tmp_path / "bpe" / "tokenizer.json").write_text(text + " ")
    assert prepare.main(["--verify", str(tmp_path / "bpe")]) == 1
    assert "tokenizer.json is not the tokenizer of the shards" in capsys.readouterr().err
    first_format.write(tmp_path / "first", [text.encode() for text in SECOND], of_bytes())
    assert prepare.main(["--verify", str(tmp_path / "first")]) == 0
    flip(tmp_path / "first" / "tokens.bin", 9)
    capsys.readouterr()
    for wrong in ["--verify", str(tmp_path / "first")], ["--verify", str(tmp_path)], ["--verify", "x", "a.txt"]:
        assert exit_code(prepare.main, wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_opening_maps_nothing_and_a_row_its_shard(folder):
    dataset = opened(folder)
    maps = [vars(shard).keys() & {"tokens", "ends", "keys"} for shard in dataset.train.mapped]
    assert not any(maps)
    dataset.train[0], dataset.train.document_starts(0)
    maps = [vars(shard).keys() & {"tokens", "ends", "keys"} for shard in dataset.train.mapped]
    assert maps[0] == {"tokens", "ends"} and not any(maps[1:])


def test_what_is_held_out_was_decided_before(folder):
    with pytest.raises(ValueError, match=r"data.val_fraction=0.3 .*--val-fraction=0.2; leave the key out, or use 0"):
        opened(folder, val_fraction=0.3)
    with pytest.raises(ValueError, match=r"tokens to hold out, but data.seq_len=30000"):
        opened(folder, seq_len=30000)


def test_more_rows_than_can_be_shuffled_are_refused(folder, monkeypatch):
    monkeypatch.setattr(token_folder, "MOST_ROWS", 100)
    with pytest.raises(ValueError, match=r"rows of data.seq_len=16; at most 100 are shuffled; use a longer"):
        opened(folder)


def test_lines_of_spans_are_those_of_the_file(tmp_path):
    lines = [json.dumps({"text": "x" * (i % 90)}) for i in range(200)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    field = spans.Field("text", "--field")
    size = path.stat().st_size
    expected = [json.loads(line)["text"].encode() for line in lines]
    for most in 1, 7, 100, size:
        divided = [spans.Span(str(path), start, min(start + most, size)) for start in range(0, size, most)]
        assert [text for span in divided for text in spans.documents([span], field, None)] == expected
    path.write_text("\n".join([*lines, "wrong"]))
    with pytest.raises(ValueError, match=r"a.jsonl:201: not valid JSON"):
        list(spans.documents([spans.Span(str(path), size - 50, size + 6)], field, None))


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_pieces_of_a_text_lose_nothing(bom, tmp_path):
    text = b"".join(b"line %d\n" % i * (i % 5) for i in range(3000)) + b"y" * 5000
    (tmp_path / "a.txt").write_bytes(bom + text)
    found = list(spans.documents(spans.shards_of([tmp_path / "a.txt"])[0], spans.Field("text", ""), None))
    assert b"".join(found) == text
    assert 50 < len(found) < 200
    assert max(map(len, found)) <= max((len(text) + len(bom)) // 100, 1024)


def killed_after(count, folder, arguments):
    """Start the command, and kill it when so many shards are finished."""
    process = multiprocessing.get_context("spawn").Process(target=prepare.main, args=(arguments,))
    process.start()
    while len(list(folder.glob("0*.json"))) < count:
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("workers", cover([], [1, 8], str))
def test_killed_twice_it_gives_the_same_bytes(workers, tmp_path):
    words = np.random.default_rng(0).integers(97, 123, size=(4, 20 << 20), dtype=np.uint8)
    words[:, ::6] = 32
    words[:, ::71] = 10
    files = [str(tmp_path / f"{i}.txt") for i in range(len(words))]
    for file, row in zip(files, words, strict=True):
        row.tofile(file)
    once, again = tmp_path / "once", tmp_path / "again"
    assert prepare.main([*files, "--workers", "1", "--out", str(once)]) == 0
    arguments = [*files, "--workers", str(workers), "--out", str(again)]
    for count in 2, 4:
        killed_after(count, again, arguments)
        assert not (again / "header.json").exists()
    assert prepare.main(arguments) == 0
    assert content(once) == content(again)
