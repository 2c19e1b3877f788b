"""GPT-2's two files and tiktoken's ranks: the ids of transformers and of tiktoken's own algorithm."""

import base64
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.tokenizers import TIKTOKEN_PATTERNS, TokenizerError, build_tokenizer
from megatron_lite.tokenizers.byte_pairs import CL100K_WORDS, GPT2_WORDS, O200K_WORDS, PUBLISHED
from megatron_lite.tokenizers.fingerprint import fingerprint

TRICKY = [
    "hello world", " leading", "  two", "trailing ", "", " ", "   ", "a\nb", "\n\n", "\r\n \r\n x", "\t tab", "日本語",
    "😀 emoji", "x  y   z", "é e\u0301", "I'm we'LL don'T 12345", "\u200bzero", "a\u00a0b", "a\u2028b\u3000c",
    "<|endoftext|> and <|endoftext|>",
    "snake_case CamelCase HTTPServer", "x = {'a': [1, 22, 333, 4444]}", "?!.. ///\n///", "ǅungla ſ ß İ", "\x00\x1f\x7f",
    "ab" * 40,
    "def f(x):\n    return x  # comment\n\n\n", "العربية हिन्दी ไทย", "<s> </s>",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
]  # fmt: skip
CORPUS = ["the quick brown fox's tail and HTTPServer camelCase it's 12345 67 things; def f(x): return x  # words\n",
          "日本語 and 日本 の本, naïve café Über über élan\n\n   indented\tand   spaced text, isn't it?\r\n"]  # fmt: skip
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NEAR = st.text(st.sampled_from(" \n\tabehtqu'sS1239.日本éÉ_"), max_size=60)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """vocab.json and merges.txt of 600 ids, the end of text last, and the folder they are in."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(CORPUS * 5, vocab_size=599, min_frequency=1, special_tokens=[], show_progress=False)
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer.save_model(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocab["<|endoftext|>"] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    return folder


def gpt2(folder):
    return build_tokenizer("GPT2BPETokenizer", vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt"))


def test_gpt2_ids_are_those_of_transformers(trained):
    from transformers import GPT2Tokenizer

    reference, tokenizer = GPT2Tokenizer.from_pretrained(str(trained)), gpt2(trained)
    size = len(json.loads((trained / "vocab.json").read_text(encoding="utf-8")))
    assert (tokenizer.vocab_size, tokenizer.eod) == (size, size - 1) == (len(reference), reference.eos_token_id)
    expected = [reference.encode(text, split_special_tokens=True) for text in TRICKY]
    assert [tokenizer.encode(text) for text in TRICKY] == expected == tokenizer.encode_batch(TRICKY)
    for text, ids in zip(TRICKY, expected, strict=True):
        assert tokenizer.eod not in ids and tokenizer.decode(ids) == text == reference.decode(
            ids, clean_up_tokenization_spaces=False
        )
    asked = [reference.encode(text) for text in TRICKY]
    assert tokenizer.encode_batch(TRICKY, special=True) == asked and asked != expected
    assert tokenizer.encode_batch(TRICKY) == expected, "asking once is not asking always"


def test_gpt2_files_that_are_none(trained, tmp_path):
    (tmp_path / "vocab.json").write_text("{bad")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(TokenizerError, match="not a GPT-2 vocabulary and its merges") as caught:
        gpt2(tmp_path)
    assert "\n" not in str(caught.value)
    vocab = json.loads((trained / "vocab.json").read_text(encoding="utf-8"))
    del vocab["<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(TokenizerError, match=r"vocab.json: has no <\|endoftext\|>"):
        _ = gpt2(tmp_path).eod


def ranks_of(folder):
    """The trained vocabulary as tokens of bytes, by rank: single bytes first, as tiktoken has them."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    tokens = [bytes(byte_of[char] for char in token) for token in sorted(vocab, key=vocab.get) if token != "<|endoftext|>"]
    return [bytes([byte]) for byte in range(256)] + [token for token in tokens if len(token) > 1]


def by_the_book(text, ranks, pattern):
    """tiktoken's algorithm word by word: the two neighbours whose union has the lowest rank are joined, the leftmost first."""
    regex = pytest.importorskip("regex")
    ids = []
    for word in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while len(parts) > 1 and word.encode() not in ranks:
            unions = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:], strict=False)]
            lowest = min(unions)
            if lowest == len(ranks):
                break
            place = unions.index(lowest)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [ranks[word.encode()]] if word.encode() in ranks else [ranks[part] for part in parts]
    return ids


@pytest.fixture(scope="module")
def ranks(trained, tmp_path_factory):
    """The tokens, a .tiktoken file of them and a JSON file as Megatron reads it."""
    folder, tokens = tmp_path_factory.mktemp("tik"), ranks_of(trained)
    (folder / "ranks.tiktoken").write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), n) for n, t in enumerate(tokens)))
    rows = [{"rank": n, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode(errors="replace")}
            for n, t in enumerate(tokens)]  # fmt: skip
    (folder / "ranks.json").write_text(json.dumps(rows))
    return tokens, folder


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.sampled_from(TRICKY), ANY, NEAR))
@pytest.mark.parametrize("pattern", ["v1", "v2", None])
def test_tiktoken_ids_by_the_book(ranks, pattern, text):
    tokens, folder = ranks
    number = {token: rank for rank, token in enumerate(tokens)}
    plain = _built(str(folder / "ranks.tiktoken"), None, pattern)
    words = CL100K_WORDS if pattern is None else TIKTOKEN_PATTERNS[pattern]
    assert plain.encode(text) == by_the_book(text, number, words)
    assert plain.decode(plain.encode(text)) == text
    if pattern is not None:
        shifted = _built(str(folder / "ranks.json"), len(tokens) + 1000, pattern)
        assert shifted.encode(text) == [1000 + rank for rank in by_the_book(text, number, words)]


BUILT = {}


def _built(path, vocab_size, pattern):
    key = path, pattern
    if key not in BUILT:
        BUILT[key] = build_tokenizer("TikTokenizer", path, vocab_size, tiktoken_pattern=pattern)
    return BUILT[key]


@pytest.mark.parametrize("words", [GPT2_WORDS, CL100K_WORDS, O200K_WORDS, *TIKTOKEN_PATTERNS.values()], ids=range(5))
def test_tiktoken_itself_agrees(ranks, words):
    """Where tiktoken is installed."""
    tiktoken = pytest.importorskip("tiktoken")
    from megatron_lite.tokenizers.byte_pairs import _merging
    from megatron_lite.tokenizers.library import library_ids

    tokens, _ = ranks
    reference = tiktoken.Encoding("t", pat_str=words, mergeable_ranks={t: n for n, t in enumerate(tokens)}, special_tokens={})
    backend = _merging(tokens, 0, words)
    for text in (*TRICKY, *CORPUS, "".join(CORPUS) * 3):
        assert library_ids(backend, [text], special=False)[0] == reference.encode_ordinary(text), text


def test_tiktoken_sizes_and_ends(ranks):
    tokens, folder = ranks
    plain, count = build_tokenizer("TikTokenizer", str(folder / "ranks.tiktoken")), len(tokens)
    assert (plain.vocab_size, plain.eod) == (count + 1, count)
    megatron = build_tokenizer("TikTokenizer", str(folder / "ranks.json"))
    assert (megatron.vocab_size, megatron.eod) == (count + 1000, 2)
    cut = build_tokenizer("TikTokenizer", str(folder / "ranks.json"), 300, tiktoken_num_special_tokens=10)
    assert (cut.vocab_size, cut.eod) == (300, 2) and max(cut.encode("".join(CORPUS))) < 300
    assert min(cut.encode("".join(CORPUS))) >= 10
    assert {count: (p.eod, p.vocab_size) for count, p in PUBLISHED.items()} == {
        50256: (50256, 50257), 100256: (100257, 100277), 128000: (128001, 128256), 199998: (199999, 200019)}  # fmt: skip


@pytest.mark.parametrize("name, content, message", [
    ("a.tiktoken", b"YQ== 0\nnot base64 1\n", "a.tiktoken:2: expected a base64 token and its rank"),
    ("a.tiktoken", b"YQ== 0\nYg== 2\n", "rank 1 is missing"),
    ("a.tiktoken", b"YQ== 0\nYg== 1\n", "has 2 of the 256 single bytes"),
    ("a.json", b"{}", "has 0 of the 256 single bytes"),
    ("a.json", b"{bad", "expected a JSON list of rank and token_bytes"),
    ("a.json", b'[{"rank": 0}]', "expected a JSON list of rank and token_bytes"),
])  # fmt: skip
def test_ranks_that_are_none(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        build_tokenizer("TikTokenizer", str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_special_ids_that_do_not_fit(ranks):
    folder = ranks[1]
    for wrong in (0, 2, 400, 401):
        with pytest.raises(TokenizerError, match=f"--tiktoken-num-special-tokens {wrong}: expected 3 .* to 399"):
            build_tokenizer("TikTokenizer", str(folder / "ranks.json"), 400, tiktoken_num_special_tokens=wrong)
    with pytest.raises(TokenizerError, match="no effect on a text file of ranks"):
        build_tokenizer("TikTokenizer", str(folder / "ranks.tiktoken"), tiktoken_num_special_tokens=10)
    with pytest.raises(TokenizerError, match="TikTokenizer has no special tokens that text could spell"):
        build_tokenizer("TikTokenizer", str(folder / "ranks.json")).encode_batch(["<s>"], special=True)


def test_fingerprints_tell_files_and_ways_of_reading_apart(trained, ranks):
    vocab, merges, path = str(trained / "vocab.json"), str(trained / "merges.txt"), str(ranks[1] / "ranks.json")
    prints = [fingerprint("GPT2BPETokenizer", None, 600, vocab, merges), fingerprint("GPT2BPETokenizer", None, 600, vocab, vocab),
              fingerprint("TikTokenizer", path, 600), fingerprint("TikTokenizer", path, 600, tiktoken_pattern="v1"),
              fingerprint("TikTokenizer", path, 600, tiktoken_num_special_tokens=5)]  # fmt: skip
    assert len(set(prints)) == len(prints)


def test_another_process_gets_the_same_ids(trained, ranks, tmp_path):
    """What workers of tools/preprocess_data.py get: pickled, of a Hugging Face folder the library's tokenizer alone."""
    from transformers import GPT2Tokenizer

    GPT2Tokenizer.from_pretrained(str(trained)).save_pretrained(str(tmp_path))
    for tokenizer in (gpt2(trained), build_tokenizer("TikTokenizer", str(ranks[1] / "ranks.json")),
                      build_tokenizer("HuggingFaceTokenizer", str(tmp_path)), build_tokenizer("ByteTokenizer")):  # fmt: skip
        sent = pickle.loads(pickle.dumps(tokenizer))
        assert (sent.vocab_size, sent.eod) == (tokenizer.vocab_size, tokenizer.eod)
        assert sent.encode_batch(TRICKY) == [tokenizer.encode(text) for text in TRICKY]
    folder = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert not isinstance(pickle.loads(pickle.dumps(folder)), type(folder))
