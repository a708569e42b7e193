"""Token ids to texts, by the tokenizer of the run's model where it is on this machine, and only where it is the right one."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from conftest import LLAMA_LIKE, TEXTS

import harvest
from harvest.report.token_texts import TokenTexts


def test_bytes_of_one_letter_stand_together(tiny_run: Path) -> None:
    run = harvest.open(tiny_run)
    texts = TokenTexts(run)
    assert texts.note is None
    ids = run.token_ids(TEXTS.index("é" * 30)).tolist()
    assert texts.pieces(ids[1:7]) == ["", "é", "", "é", "", "é"]
    assert "".join(texts.pieces(run.token_ids(0).tolist())[1:]) == TEXTS[0]


def test_words_keep_the_spaces_in_front(smollm2: Path, tmp_path: Path) -> None:
    request = harvest.HarvestRequest(model=str(smollm2), prompts=["The cat sat; naïve 日本 🙂 end"], layers=[0])
    harvest.run(request, tmp_path / "run")
    run = harvest.open(tmp_path / "run")
    pieces = TokenTexts(run).pieces(run.token_ids(0).tolist())
    assert pieces[:4] == ["<|im_start|>", "The", " cat", " sat"]
    assert "".join(pieces[1:]) == run.text(0)
    assert TokenTexts(run).pieces(run.token_ids(0)[2:4].tolist()) == [" cat", " sat"]


def test_words_of_the_sentencepiece_kind_keep_their_spaces_too(save_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(save_model(transformers.LlamaConfig(**LLAMA_LIKE)), tmp_path / "model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "▁The": 1, "▁cat": 2, "▁sat": 3}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    words.decoder = tokenizers.decoders.Metaspace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    request = harvest.HarvestRequest(model=str(folder), prompts=["The cat sat"], add_special_tokens=False)
    harvest.run(request, tmp_path / "run")
    run = harvest.open(tmp_path / "run")
    assert TokenTexts(run).pieces(run.token_ids(0).tolist()) == [" The", " cat", " sat"]


@pytest.fixture
def moved(save_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A run of a model whose folder is gone."""
    model = shutil.copytree(save_model(transformers.LlamaConfig(**LLAMA_LIKE)), tmp_path / "model")
    harvest.run(harvest.HarvestRequest(model=str(model), prompts=["abc", "de"]), tmp_path / "run")
    shutil.rmtree(model)
    return tmp_path / "run"


def test_where_the_tokenizer_is_not_to_be_had_ids_stand_for_texts(moved: Path) -> None:
    texts = TokenTexts(harvest.open(moved))
    assert texts.note is not None
    assert "is not on this machine" in texts.note
    assert texts.pieces([97, 98]) == ["97 ", "98 "]


@pytest.mark.parametrize("change", ["text", "tokenizer"])
def test_another_tokenizer_is_not_believed(change: str, tiny_run: Path, smollm2: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    if change == "text":
        manifest["prompts"][1] = "something else"
    else:
        manifest["model_id"] = manifest["hf_repo"] = str(smollm2)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    texts = TokenTexts(harvest.open(folder))
    assert texts.note is not None
    assert "gives other ids" in texts.note


def test_nothing_is_fetched_for_a_model_of_the_hub(projected_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(projected_run, tmp_path / "run")
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    manifest["model_id"] = manifest["hf_repo"] = "nobody/has-this"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    # A hub that may be asked, and that would count it.
    with counting_server() as (address, asked):
        environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf")}
        words = [sys.executable, "-m", "harvest", "report", "--quiet", folder, "--out", tmp_path / "page.html"]
        subprocess.run(words, check=True, capture_output=True, env=environment)
        assert asked == []
        code = "import sys; from harvest.report.write import write_report; write_report(*sys.argv[1:])"
        subprocess.run([sys.executable, "-c", code, folder, tmp_path / "page.html"], check=True, capture_output=True, env=environment)
        # Whatever else the hub's library asks for when it is not told to be offline.
        assert not [path for path in asked if "has-this" in path]
    page = (tmp_path / "page.html").read_text()
    assert "Tokens are shown by their ids: the tokenizer of nobody/has-this is not on this machine" in page


@contextmanager
def counting_server() -> Iterator[tuple[str, list[str]]]:
    """The address of a server on loopback that has nothing, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, format: str, *values: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()
