"""Every type that transformers has a model of text for, as a tiny random model: read right, or refused; never wrong."""

from collections import Counter

import pytest
from sweep import COVERED, REFUSED, UNBUILT, WRONG, main, may_be_decoder, sweep
from tiny_configs import decoder_types

# By the release of transformers that constraints.txt names; another may have more types, and build others.
LEAST_COVERED = 231
LEAST_CUT = 231
# Saved and read a block at a time. Not so: blocks that share weights or hand on more than the stream, and two types whose own files
# transformers does not read again.
LEAST_STREAMED = 226
# Of the refused, those that are read where the config says that the model is a decoder: BERT's kin, and halves of encoder-decoders.
LEAST_AS_DECODER = 26


@pytest.mark.timeout(900)
def test_every_type_is_read_right_or_refused() -> None:
    rows = [sweep(model_type) for model_type in sorted(decoder_types())]
    states = Counter(row.state for row in rows)
    table = "\n".join(map(str, rows))
    assert states[WRONG] == 0, table
    assert states[COVERED] >= LEAST_COVERED, table
    assert sum(row.is_cut for row in rows) >= LEAST_CUT, table
    assert sum(row.is_streamed for row in rows) >= LEAST_STREAMED, table
    assert not [row for row in rows if row.is_streamed and row.state != COVERED], table
    as_decoder = [sweep(row.model_type, as_decoder=True) for row in rows if row.state == REFUSED and may_be_decoder(row.model_type)]
    assert not [row for row in as_decoder if row.state == WRONG], as_decoder
    assert sum(row.state == COVERED for row in as_decoder) >= LEAST_AS_DECODER, "\n".join(map(str, as_decoder))
    assert states[COVERED] + states[REFUSED] + states[UNBUILT] == len(rows)


@pytest.mark.parametrize(
    ("model_type", "state", "words"),
    [
        ("llama", COVERED, "cut: same bits; streamed: same bits; final norm norm"),
        ("opt", COVERED, "same bits"),
        ("mamba", COVERED, "same bits"),
        # Read by block, to the same bits, or refused before a row is written.
        ("mixtral", COVERED, "streamed: same bits"),
        ("deepseek_v32", COVERED, "streamed: same bits"),
        ("zaya", COVERED, "streamed: no (ModelError: model: decoder block 1 of ZayaModel gives other numbers when it is given its stream"),
        ("zamba", COVERED, "streamed: no (ModelError: model: the checkpoint has no tensors of its own for 9 of decoder block 3"),
        ("zamba2", COVERED, "streamed: no (ModelError: model: the checkpoint has no tensors of its own for 12 of decoder block 3"),
        ("bert-generation", REFUSED, "when the tokens to its right are other"),
        ("dory", REFUSED, "calls its 4 decoder blocks as 0, 1, 2, 3, 0"),
        ("deepseek_v4", REFUSED, "where one stream of shape"),
        # Their attention chooses among all keys of a batch, so they are read in batches of one length.
        ("doge", COVERED, "same bits"),
        ("deepseek_v32", COVERED, "same bits"),
        ("prophetnet", REFUSED, "an encoder-decoder"),
        # Models for pictures or sound, by their text alone: nearly all run whole without a picture, and are held against that.
        ("gemma3", COVERED, "of the whole model; cut: same bits; streamed: same bits; final norm norm"),
        ("qwen2_vl", COVERED, "of the whole model; cut: same bits; streamed: same bits; final norm norm"),
        ("qwen3_5", COVERED, "of the whole model; cut: same bits; streamed: same bits; final norm norm"),
        ("qwen2_5_omni", COVERED, "cut: same bits; streamed: no"),
        ("kosmos-2", COVERED, "of the decoder alone"),
        ("paligemma", REFUSED, "when the tokens to its right are other"),
        ("idefics", REFUSED, "cannot be run on token ids alone"),
        ("mllama", REFUSED, "calls its 4 decoder blocks as 0, 1, 2; harvest needs"),
        # num_hidden_layers counts the attentions, two a block.
        ("longcat_flash", COVERED, "same bits"),
        ("gemma3n_text", REFUSED, "hand out [4, 1, 64, 32]"),
        ("bart", REFUSED, "an encoder-decoder"),
        ("bert", REFUSED, "when the tokens to its right are other"),
    ],
)
def test_what_is_said_of_a_type(model_type: str, state: str, words: str) -> None:
    row = sweep(model_type)
    assert (row.state, words in row.words) == (state, True), row


@pytest.mark.parametrize("model_type", ["bert", "bart", "whisper"])
def test_a_decoder_of_a_type_that_is_an_encoder_by_default(model_type: str) -> None:
    assert sweep(model_type, as_decoder=True).state == COVERED


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama"]) == 0
    assert "llama                        covered" in capsys.readouterr().out
