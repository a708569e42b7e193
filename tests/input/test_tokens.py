"""Token ids by real tokenizers, also ones that would add special tokens, cut or pad by themselves."""

import logging
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from harvest.errors import PromptsError
from harvest.input.tokens import tokenize
from harvest.model.tiny import tiny_tokenizer

START = 256  # of the tiny tokenizer, whose other ids are the bytes
TINY_VOCAB = 257

BOS, EOS, UNKNOWN, A, B, C = range(6)  # the ids of word_tokenizer
WORDS = {"<s>": BOS, "</s>": EOS, "?": UNKNOWN, "a": A, "b": B, "c": C}


def word_backend() -> Tokenizer:
    """Words between spaces, and a post-processor that puts <s> before a text and </s> after it, as Llama's and BERT's do."""
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)])
    return backend


def word_tokenizer(backend: Tokenizer | None = None, **settings: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend or word_backend(), bos_token="<s>", eos_token="</s>", unk_token="?", pad_token="?", **settings
    )


def ids_of(texts: list[str], tokenizer: Any, start: int | None = None, max_tokens: int | None = None) -> list[list[int]]:
    tokens = tokenize(texts, tokenizer, start, max_tokens, None)
    return [tokens.of(prompt).tolist() for prompt in range(len(texts))]


@pytest.fixture
def transformers_log() -> Iterator[list[logging.LogRecord]]:
    """What transformers logs, from warnings up. It does not pass it on to Python's root logger, where caplog would see it."""
    logger, handler = logging.getLogger("transformers"), BufferingHandler(capacity=100)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    yield handler.buffer
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_the_ids_of_all_prompts_stand_end_to_end() -> None:
    tokens = tokenize(["ab", "", "c"], tiny_tokenizer(), START, None, TINY_VOCAB)
    assert tokens.ids.tolist() == [START, 97, 98, START, START, 99]
    assert tokens.offsets.tolist() == [0, 3, 4, 6]
    assert tokens.lengths.tolist() == [3, 1, 2]
    assert [tokens.of(prompt).tolist() for prompt in range(3)] == [[START, 97, 98], [START], [START, 99]]
    assert [str(array.dtype) for array in (tokens.ids, tokens.offsets, tokens.lengths)] == ["int32", "int64", "int64"]
    assert (tokens.start_token_id, tokens.cut, tokens.doubled) == (START, [], [])


def test_without_a_start_token_none_is_put() -> None:
    tokens = tokenize(["ab", "c"], tiny_tokenizer(), None, None, TINY_VOCAB)
    assert tokens.ids.tolist() == [97, 98, 99]
    assert tokens.start_token_id is None


@pytest.mark.parametrize(
    "text",
    ["plain", " two  spaces ", "\n\t\r\n", "é\u2028日本 😀", "e\u0301", "\0", "\ufeff", "</s><pad>", "".join(map(chr, range(256)))],
    ids=ascii,
)
def test_the_tiny_tokenizer_reads_the_bytes_of_a_text(text: str) -> None:
    assert ids_of([text], tiny_tokenizer(), START) == [[START, *text.encode()]]


def test_what_a_tokenizer_adds_by_itself_is_left_out() -> None:
    tokenizer = word_tokenizer()
    assert tokenizer(["a b"])["input_ids"] == [[BOS, A, B, EOS]]
    assert ids_of(["a b", "c"], tokenizer) == [[A, B], [C]]
    assert ids_of(["a b", "c"], tokenizer, start=BOS) == [[BOS, A, B], [BOS, C]]


def test_truncation_set_in_a_tokenizer_is_switched_off() -> None:
    backend = word_backend()
    backend.enable_truncation(3)
    assert backend.encode("a b c a").ids == [BOS, A, EOS]
    assert ids_of(["a b c a"], word_tokenizer(backend)) == [[A, B, C, A]]


def test_padding_set_in_a_tokenizer_is_switched_off() -> None:
    backend = word_backend()
    backend.enable_padding(length=6, pad_id=UNKNOWN, pad_token="?")
    assert backend.encode("a").ids == [BOS, A, EOS, UNKNOWN, UNKNOWN, UNKNOWN]
    assert ids_of(["a", "b c"], word_tokenizer(backend)) == [[A], [B, C]]


@pytest.mark.parametrize("model_max_length", [2, int(1e30)])
def test_the_length_limit_of_a_tokenizer_counts_for_nothing(model_max_length: int) -> None:
    assert ids_of(["a b c"], word_tokenizer(model_max_length=model_max_length), start=BOS) == [[BOS, A, B, C]]


@pytest.mark.parametrize(
    ("start", "max_tokens", "ids", "cut"),
    [
        (BOS, None, [[BOS, A, B, C], [BOS, A], [BOS, A, B]], []),
        (BOS, 4, [[BOS, A, B, C], [BOS, A], [BOS, A, B]], []),
        (BOS, 3, [[BOS, A, B], [BOS, A], [BOS, A, B]], [0]),
        (BOS, 2, [[BOS, A], [BOS, A], [BOS, A]], [0, 2]),
        (BOS, 1, [[BOS], [BOS], [BOS]], [0, 1, 2]),
        (None, 3, [[A, B, C], [A], [A, B]], []),
        (None, 2, [[A, B], [A], [A, B]], [0]),
    ],
)
def test_the_first_ids_are_kept_the_start_token_counted(
    start: int | None, max_tokens: int | None, ids: list[list[int]], cut: list[int]
) -> None:
    texts = ["a b c", "a", "a b"]
    assert ids_of(texts, word_tokenizer(), start, max_tokens) == ids
    assert tokenize(texts, word_tokenizer(), start, max_tokens, None).cut == cut


def test_a_start_token_in_the_text_is_doubled_and_said() -> None:
    texts = ["<s>a", "a<s>", "<s>", "a", "<s><s>"]
    tokens = tokenize(texts, tiny_tokenizer(), START, None, TINY_VOCAB)
    assert tokens.doubled == [0, 2, 4]
    assert tokens.of(0).tolist() == [START, START, 97]


@pytest.mark.parametrize("start", [None, EOS])
def test_a_start_token_is_not_doubled_where_it_was_not_put(start: int | None) -> None:
    tokens = tokenize(["<s> a"], word_tokenizer(), start, None, None)
    assert tokens.doubled == []
    assert tokens.of(0).tolist() == [*([] if start is None else [start]), BOS, A]


def test_a_doubled_prompt_that_is_cut_is_both() -> None:
    tokens = tokenize(["a", "<s>bc"], tiny_tokenizer(), START, 3, TINY_VOCAB)
    assert (tokens.doubled, tokens.cut, tokens.of(1).tolist()) == ([1], [1], [START, START, 98])


@pytest.mark.parametrize("text", ["", " \n "])
def test_a_prompt_without_tokens_is_an_error_unless_a_start_token_stands_there(text: str) -> None:
    assert ids_of(["a", text], word_tokenizer(), start=BOS) == [[BOS, A], [BOS]]
    with pytest.raises(PromptsError) as caught:
        tokenize(["a", text], word_tokenizer(), None, None, None)
    assert str(caught.value) == f"prompt 1: {text!r} has no tokens, and no start token is added; leave it out"


@pytest.mark.parametrize(("start", "text", "beyond"), [(None, "a c", C), (BOS, "b c a", C), (7, "a", 7)])
def test_an_id_that_the_model_lacks_is_an_error(start: int | None, text: str, beyond: int) -> None:
    tokenize(["a", text], word_tokenizer(), start, None, beyond + 1)
    prompt = 0 if start == beyond else 1
    with pytest.raises(PromptsError, match=f"^prompt {prompt}: token id {beyond} is beyond the model's {beyond} embeddings; "):
        tokenize(["a", text], word_tokenizer(), start, None, beyond)


def test_an_id_that_is_cut_off_need_not_be_in_the_model() -> None:
    assert tokenize(["a c"], word_tokenizer(), BOS, 2, C).of(0).tolist() == [BOS, A]


def test_added_tokens_beyond_the_embeddings_are_found() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(PromptsError, match="token id 257 is beyond the model's 257 embeddings"):
        tokenize(["a<new>"], tokenizer, START, None, TINY_VOCAB)


def test_thousands_of_prompts_keep_their_order_and_numbers() -> None:
    texts = [f"{'<s>' * (number % 1000 == 999)}{number}" for number in range(2500)]
    tokens = tokenize(texts, tiny_tokenizer(), START, 5, TINY_VOCAB)
    rows = [[START, *([START] if text.startswith("<s>") else []), *text.removeprefix("<s>").encode()] for text in texts]
    assert [tokens.of(prompt).tolist() for prompt in range(2500)] == [row[:5] for row in rows]
    assert tokens.doubled == [999, 1999]
    assert tokens.cut == [1999]


def test_no_warning_that_a_text_is_longer_than_the_tokenizer_says(transformers_log: list[logging.LogRecord]) -> None:
    tokenize(["a b c"], word_tokenizer(model_max_length=2), BOS, None, None)
    assert transformers_log == []
    # A fresh tokenizer says it where harvest does not hush it: the level of the log is as it was before.
    word_tokenizer(model_max_length=2)(["a b c"], add_special_tokens=False)
    assert "longer than the specified maximum" in transformers_log[0].getMessage()


def test_the_log_is_as_it_was_after_an_error_too(transformers_log: list[logging.LogRecord]) -> None:
    with pytest.raises(PromptsError):
        tokenize([""], word_tokenizer(), None, None, None)
    word_tokenizer(model_max_length=2)(["a b c"], add_special_tokens=False)
    assert len(transformers_log) == 1


def test_one_list_of_texts_gives_one_answer() -> None:
    tokenizer, texts = word_tokenizer(), ("a b", "c", "a")
    first, second = (tokenize(texts, tokenizer, BOS, 2, None) for _ in range(2))
    assert first.ids.tolist() == second.ids.tolist() == [BOS, A, BOS, C, BOS, A]
    assert (first.cut, second.cut) == ([0], [0])
