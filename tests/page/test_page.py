"""The page in a real Chromium: light and dark, on a desk and on a phone, whole in itself, and safe from what stands in prompts."""

import html
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tiny_request

import harvest
from harvest.errors import NotARunError, RequestError
from harvest.input.directions import tensor_object
from harvest.report.write import write_report
from page.chromium import Chromium
from page.conftest import N_DIRECTIONS

PARTS = {
    "activations": ["overview", "norms", "dimensions", "prompts", "files"],
    "projections": ["overview", "directions", "prompts", "files"],
}
OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"
OVERFLOW = """
[...document.querySelectorAll('body *')].filter(one => !one.closest('.table') && one.getBoundingClientRect().right > innerWidth + 1)
    .map(one => one.outerHTML.slice(0, 200))
"""


@pytest.fixture(scope="module")
def pages(hostile_run: Path, projected_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of each kind of run."""
    folder = tmp_path_factory.mktemp("pages")
    runs = {"activations": hostile_run, "projections": projected_run}
    return {contents: write_report(run, folder / f"{contents}.html") for contents, run in runs.items()}


@pytest.mark.chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 375, 1200])
@pytest.mark.parametrize("contents", PARTS)
def test_the_page_is_whole_in_itself_and_fits(
    contents: str, width: int, scheme: str, pages: dict[str, Path], chromium: Chromium, tmp_path: Path
) -> None:
    page = pages[contents]
    chromium.open(page, width, scheme=scheme)
    chromium.evaluate(OPEN_ALL)
    assert chromium.evaluate("[...document.querySelectorAll('main > section')].map(one => one.id)") == PARTS[contents]
    assert chromium.evaluate("[...document.querySelectorAll('nav a')].every(one => document.querySelector(one.getAttribute('href')))")
    assert chromium.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), chromium.evaluate(OVERFLOW)
    assert chromium.evaluate(OVERFLOW) == []
    assert [request["request"]["url"] for request in chromium.named("Network.requestWillBeSent")] == [page.as_uri()]
    for complaint in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
        assert chromium.named(complaint) == []
    chromium.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.chromium
@pytest.mark.parametrize("contents", PARTS)
def test_plots_have_a_size_a_text_and_words_that_can_be_read(contents: str, pages: dict[str, Path], chromium: Chromium) -> None:
    for width in (375, 1200):
        chromium.open(pages[contents], width)
        chromium.evaluate(OPEN_ALL)
        plots = chromium.evaluate(
            "[...document.querySelectorAll('svg')].map(one => {const box = one.getBoundingClientRect();"
            "return {width: box.width, height: box.height, label: one.getAttribute('aria-label'), role: one.getAttribute('role')}})"
        )
        assert len(plots) == (6 if contents == "activations" else 2 + N_DIRECTIONS)
        for plot in plots:
            assert plot["width"] > 200, plot
            assert plot["height"] > 100, plot
            assert plot["role"] == "img"
            assert len(plot["label"]) > 20, plot
        # Of a letter: what is smaller is seen, and not read.
        heights = chromium.evaluate("[...document.querySelectorAll('svg text')].map(one => one.getBoundingClientRect().height)")
        assert min(heights) > 9


@pytest.mark.chromium
@pytest.mark.parametrize("contents", PARTS)
def test_a_dark_scheme_turns_page_plots_and_tokens(contents: str, pages: dict[str, Path], chromium: Chromium) -> None:
    looked_at = {"page": ("body", "backgroundColor"), "text": ("body", "color"), "words": ("svg text", "fill")}
    looked_at["line"] = ("svg path[style*='depth'], svg path[style*='accent']", "stroke")
    if contents == "projections":
        looked_at["token"] = (".n5, .p5", "backgroundColor")
    seen: dict[str, dict[str, Any]] = {}
    for scheme in ("light", "dark"):
        chromium.open(pages[contents], 1200, scheme=scheme)
        seen[scheme] = {
            name: chromium.evaluate(f"getComputedStyle(document.querySelector({selector!r}))[{style!r}]")
            for name, (selector, style) in looked_at.items()
        }
    light, dark = ({name: _lightness(colour) for name, colour in seen[scheme].items()} for scheme in ("light", "dark"))
    assert all(seen["light"][name] != seen["dark"][name] for name in looked_at), seen
    assert light["page"] > 240
    assert dark["page"] < 40
    for words in ("text", "words", "line"):
        assert light["page"] - light[words] > 60, light
        assert dark[words] - dark["page"] > 60, dark


def _lightness(colour: str) -> float:
    """The mean of red, green and blue."""
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


@pytest.mark.chromium
@pytest.mark.parametrize("contents", PARTS)
def test_what_stands_in_a_prompt_stays_text(contents: str, pages: dict[str, Path], chromium: Chromium) -> None:
    chromium.open(pages[contents], 1200)
    assert chromium.evaluate("document.title") == "tiny: harvest report"
    assert chromium.evaluate("document.querySelectorAll('script, img, iframe, object, embed, link, base, form, main b b').length") == 0
    assert chromium.evaluate("document.querySelectorAll('style').length") == 1
    assert chromium.evaluate("getComputedStyle(document.body).display") == "block"
    text = chromium.evaluate(f"{OPEN_ALL}, document.body.textContent")
    assert ("<!-- a comment " in text) if contents == "activations" else ("<script>docum" in text)
    assert not set(text) & set("\x00\x1b\u202e\u2066")


@pytest.mark.parametrize("contents", PARTS)
def test_the_file_holds_no_foreign_element_and_no_address(contents: str, pages: dict[str, Path]) -> None:
    page = pages[contents].read_text()
    assert "default-src 'none'" in page
    elements = set(re.findall(r"</?([a-zA-Z!?][^\s>/]*)", page))
    allowed = "!doctype html head meta title style body header p h1 h2 h3 h4 nav a main section ul ol li b i small span dl div dt dd figure"
    allowed += " figcaption svg defs path g use text tspan clipPath rect details summary table thead tbody tr th td footer"
    assert elements - set(allowed.split()) == set()
    # Names of namespaces are no links; a prompt's own text stands there escaped.
    assert set(re.findall(r'(?:src|href)="([^"#]+)', page)) == set()
    assert "@import" not in page
    assert "url(" not in page.split("<body>")[0]
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


def test_the_same_run_makes_the_same_page(hostile_run: Path, pages: dict[str, Path], tmp_path: Path) -> None:
    again = write_report(hostile_run, tmp_path / "again.html")
    assert again.read_bytes() == pages["activations"].read_bytes()


def test_the_page_says_what_was_cut_and_what_is_shown(pages: dict[str, Path]) -> None:
    page = pages["activations"].read_text()
    assert "2 prompts to the context" in page
    assert html.escape("<!-- a comment ") * 3 in page
    projected = pages["projections"].read_text()
    assert projected.count('<div class="direction">') == N_DIRECTIONS
    assert "◌" in projected, "the first byte of a letter has a sign of its own"
    assert "↵" in projected
    contexts = re.findall(r'<ol class="contexts">.*?</ol>', projected, re.DOTALL)
    assert len(contexts) == N_DIRECTIONS * 4 * 2
    assert all(len(re.findall("<li>", context)) == 8 for context in contexts)
    assert all(len(re.findall("<b [^>]*title=", context)) == 8 for context in contexts)


def test_layers_can_be_chosen(hostile_run: Path, tmp_path: Path) -> None:
    page = write_report(hostile_run, tmp_path / "page.html", layers=[3, 1]).read_text()
    assert "in layers 1, 3." in page
    assert "layer 2<" not in page


def test_a_sample_says_so(hostile_run: Path, tmp_path: Path) -> None:
    run = harvest.open(hostile_run)
    page = write_report(hostile_run, tmp_path / "page.html", max_values=run.n_tokens * 4 * run.width // 2).read_text()
    assert re.search(rf"Figures are of a sample: \d+ of {run.n_tokens} tokens", page)
    assert "Figures are of a sample" not in write_report(hostile_run, tmp_path / "page.html", max_values=None).read_text()


@pytest.mark.parametrize("projects", [False, True])
def test_prompts_of_one_token_make_a_page_too(projects: bool, hostile_run: Path, tmp_path: Path) -> None:
    directions = tensor_object(np.ones(harvest.open(hostile_run).width, dtype=np.float32)) if projects else None
    harvest.run(tiny_request(["a", "b"], add_special_tokens=False, project_onto=directions), tmp_path / "run")
    assert "There is no token to say something of" in write_report(tmp_path / "run", tmp_path / "page.html").read_text()


def test_bad_requests_say_what_is_wrong_before_anything_is_read(hostile_run: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"layers: 7, 9 was given, but the run holds the layers 0-3"):
        write_report(hostile_run, tmp_path / "page.html", layers=[1, 7, 9])
    with pytest.raises(RequestError, match="is a folder; name a file in it"):
        write_report(hostile_run, tmp_path)
    with pytest.raises(RequestError, match="there is no folder"):
        write_report(hostile_run, tmp_path / "nowhere" / "page.html")
    with pytest.raises(NotARunError, match="no such run folder"):
        write_report(tmp_path / "none", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_command_writes_the_page_and_prints_its_path(hostile_run: Path, pages: dict[str, Path], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "harvest", "report", hostile_run, "--out", tmp_path / "page.html"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path / 'page.html'}\n"
    assert "tokens/s" in done.stderr
    assert (tmp_path / "page.html").read_bytes() == pages["activations"].read_bytes()


def test_without_matplotlib_it_says_how_to_get_it(hostile_run: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from harvest.cli import main; main()"
    words = [sys.executable, "-c", code, "report", str(hostile_run), "-o", str(tmp_path / "page.html")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'harvest[report]'" in done.stderr
