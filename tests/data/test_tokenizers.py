"""Tokenizers: true sizes, their own end of document, equal ids in both forms of a model, special text stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.data.corpus import python_library_texts
from megatron_lite.tokenizers import TokenizerError, build_tokenizer

WORDS = "the quick brown fox jumps over a lazy dog and 12345 other things, they say: hello world!".split()
TRICKY = [
    "hello world", " leading", "  two", "trailing ", "", " ", "   ", "a\nb", "\n\n", "\t tab", "日本語", "😀 emoji",
    "x  y   z", "é e\u0301", "<0x0A>", "\u2581under", "a\u2581b", "I'm 12345", "\u200bzero", "a\u00a0b", "\r\n",
    "</s>", "<s> and </s>", " </s> x", "end</s>", "<unk>",
]  # fmt: skip


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A small BPE model with byte fallback, of the kind LLaMA uses."""
    from sentencepiece import SentencePieceTrainer

    folder = tmp_path_factory.mktemp("spm")
    (folder / "text.txt").write_text("".join(" ".join(WORDS[i:] + WORDS[:i]) + "\n" for i in range(12)) * 4)
    SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=340, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False, num_threads=1, minloglevel=2,
    )  # fmt: skip
    return str(folder / "tokenizer.model")


def byte_level(folder, eos="<|endoftext|>", size=300, added=()):
    """A Hugging Face folder with a byte-level BPE of `size` base ids, and added tokens after them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[eos] if eos else [])
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.add_tokens(list(added))
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": eos} if eos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_level(tmp_path_factory.mktemp("hf"))


def test_t01_vocabulary_counts_added_tokens(tmp_path):
    added = [f"<extra_{i}>" for i in range(5)]
    folder = byte_level(tmp_path, size=300, added=added)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
    base = len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"])
    ids = tokenizer.encode("hello " + "".join(added))
    assert tokenizer.vocab_size == base + 5 and max(ids) == base + 4
    with pytest.raises(TokenizerError, match=f"--vocab-size {base} is too small: the tokenizer has {base + 5}"):
        build_tokenizer("HuggingFaceTokenizer", folder, base)
    assert build_tokenizer("HuggingFaceTokenizer", folder, base + 5).vocab_size == base + 5


def test_t02_the_end_of_document_is_the_tokenizers_own(tmp_path, folder, sentencepiece_model):
    assert build_tokenizer("HuggingFaceTokenizer", folder).eod == 0
    assert build_tokenizer("SentencePieceTokenizer", sentencepiece_model).eod == 2
    without = build_tokenizer("HuggingFaceTokenizer", byte_level(tmp_path, eos=None))
    with pytest.raises(TokenizerError, match="has no eos_token"):
        _ = without.eod


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory, sentencepiece_model):
    """The same model as transformers gets it: as the .model alone, and as the tokenizer.json that LLaMA comes with."""
    alone, converted = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("converted")
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for target in (alone, converted):
        (target / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    with open(sentencepiece_model, "rb") as file:
        (alone / "tokenizer.model").write_bytes(file.read())
    from transformers import AutoTokenizer

    content = json.loads(AutoTokenizer.from_pretrained(str(alone)).backend_tokenizer.to_str())
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, mark]}
    content["pre_tokenizer"] = None
    (converted / "tokenizer.json").write_text(json.dumps(content))
    return [str(alone), str(converted)]


def test_t04_sentencepiece_and_hugging_face_forms_agree(sentencepiece_model, two_folders):
    reference = build_tokenizer("SentencePieceTokenizer", sentencepiece_model)
    for folder in two_folders:
        tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
        assert (tokenizer.vocab_size, tokenizer.eod) == (reference.vocab_size, reference.eod)
        for text in TRICKY:
            ids = reference.encode(text)
            assert tokenizer.encode(text) == ids, text
            assert not {1, 2} & set(ids), "no BOS or EOS is added, and text that spells one is text"
            assert tokenizer.decode(ids) == reference.decode(ids)


def test_t07_text_that_spells_a_special_token_stays_text(folder):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
    text = "before<|endoftext|>after <|endoftext|>"
    ids = tokenizer.encode(text)
    assert tokenizer.eod not in ids and tokenizer.decode(ids) == text


def test_round_trip_of_the_byte_level_folder(folder):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_tokenizer(text):
    tokenizer = build_tokenizer("ByteTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode() and tokenizer.decode([*ids, 256, 300]) == text


def test_byte_tokenizer_at_the_edges():
    tokenizer = build_tokenizer("ByteTokenizer")
    assert tokenizer.decode("日".encode()[:2]) == "\ufffd"
    with pytest.raises(TokenizerError, match="surrogates not allowed at character 1"):
        tokenizer.encode("a\ud800")


def test_null_tokenizer():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=128)
    assert (tokenizer.vocab_size, tokenizer.eod) == (129, 128)
    assert tokenizer.encode(" 0 5\t127\n") == [0, 5, 127] and tokenizer.decode([0, 5, 128]) == "0 5 128"
    for wrong in ("128", "-1", "x", "1.5", "٣", "9" * 5000):
        with pytest.raises(TokenizerError, match="not an id from 0 to 127"):
            tokenizer.encode(f"1 {wrong}")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("Nonsense",), "expected one of HuggingFaceTokenizer, SentencePieceTokenizer, GPT2BPETokenizer"),
        (("NullTokenizer",), "needs --vocab-size"),
        (("NullTokenizer", None, 0), "needs at least 1"),
        (("NullTokenizer", "file", 5), "NullTokenizer reads no file"),
        (("ByteTokenizer", None, 256), "--vocab-size 256 is too small"),
        (("HuggingFaceTokenizer",), "needs --tokenizer-model"),
        (("HuggingFaceTokenizer", "gpt2-not-here"), "gpt2-not-here: no such folder"),
        (("SentencePieceTokenizer", "not-here.model"), "not-here.model: no such file"),
        (("SentencePieceTokenizer", __file__), "not a sentencepiece model"),
        (("GPT2BPETokenizer",), "GPT2BPETokenizer needs --vocab-file"),
        (("GPT2BPETokenizer", None, None, "v.json"), "GPT2BPETokenizer needs --merge-file"),
        (("GPT2BPETokenizer", "folder", None, "v.json", "m.txt"), "reads --vocab-file --merge-file, leave it out"),
        (("GPT2BPETokenizer", None, None, "v.json", "m.txt"), "--vocab-file v.json: no such file"),
        (("ByteTokenizer", None, None, None, None, "v1"), "--tiktoken-pattern v1: ByteTokenizer reads no file"),
        (("TikTokenizer", "not-here.tiktoken"), "not-here.tiktoken: no such file"),
    ],
)
def test_what_cannot_work_is_one_line_that_names_flag_or_file(arguments, message):
    with pytest.raises(TokenizerError, match=message) as caught:
        build_tokenizer(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "{bad", "{}"])
def test_an_unusable_folder_is_one_line(tmp_path, content):
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=f"--tokenizer-model {tmp_path}: transformers cannot load it") as caught:
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_python_library_is_a_fixed_corpus_of_text():
    texts = dict(python_library_texts())
    names = [name for name, _ in python_library_texts()]
    assert len(texts) == len(names) > 300 and sum(map(len, texts.values())) > 3_000_000
    assert "topics/assert" in texts and "argparse.py" in texts and "json/decoder.py" in texts
    assert names == sorted(names, key=lambda name: (not name.startswith("topics/"), name.removeprefix("topics/")))
    assert not any(part in f"/{name}" for name in names for part in ("/test/", "site-packages", "_sysconfigdata"))
