"""Text while it streams: complete characters only, and in the end the same as decoding at once."""
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sluice.detokenize import Detokenizer, byte_alphabet

SAMPLES = ["def naïve(x):\n    return '€ 20 – 日本語 🙂'\n", "plain ascii", "🙂🙂🙂", "\r\n\t é"]


@pytest.fixture(scope="module")
def tokenizer():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|begin|>", "<|end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(SAMPLES, trainer)
    return tok


def stream(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    pieces = [detokenizer.push([i]) for i in ids]
    return pieces, "".join(pieces) + detokenizer.finish()


def test_alphabet_is_the_library_s():
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("text", SAMPLES)
def test_text_streams_whole_characters(tokenizer, text):
    ids = tokenizer.encode(text).ids
    pieces, whole = stream(tokenizer, ids)
    assert whole == text
    assert "\ufffd" not in "".join(pieces)
    assert len(ids) > 1 and any(pieces[:-1])  # it did stream


def test_single_bytes_of_a_character_are_held(tokenizer):
    by_byte = {b: tokenizer.token_to_id(c) for c, b in byte_alphabet().items()}
    pieces, whole = stream(tokenizer, [by_byte[b] for b in "a🙂b".encode()])
    assert pieces == ["a", "", "", "", "🙂", "b"]
    assert whole == "a🙂b"


def test_incomplete_end_becomes_a_replacement_at_the_end(tokenizer):
    by_byte = {b: tokenizer.token_to_id(c) for c, b in byte_alphabet().items()}
    pieces, whole = stream(tokenizer, [by_byte[b] for b in "é€".encode()[:-1]])
    assert pieces[-1] == "" and whole == "é\ufffd"


def test_random_ids_equal_decoding_at_once(tokenizer):
    rng = random.Random(5)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 30))]
        assert stream(tokenizer, ids)[1] == tokenizer.decode(ids)


def test_special_tokens_are_skipped_or_kept(tokenizer):
    ids = tokenizer.encode("plain").ids + [tokenizer.token_to_id("<|end|>")]
    assert stream(tokenizer, ids)[1] == "plain"
    assert stream(tokenizer, ids, skip_special_tokens=False)[1] == "plain<|end|>"


def test_ids_beyond_the_tokenizer_add_nothing(tokenizer):
    assert stream(tokenizer, [5000])[1] == ""


def test_other_decoders_stream_too():
    tok = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, unk_token="c"))
    tok.decoder = decoders.Metaspace()
    pieces, whole = stream(tok, [0, 1, 2])
    assert whole == tok.decode([0, 1, 2])
    assert len([p for p in pieces if p]) > 1
