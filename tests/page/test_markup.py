"""Text in markup: nothing in it is markup of its own."""

from harvest.report.markup import details, facts, figure, section, table, text, tiles

EVIL = "<i>\"'&</i>\x00\x7f\u202e"
SAFE = "&lt;i&gt;&quot;&#x27;&amp;&lt;/i&gt;␀␡\N{REPLACEMENT CHARACTER}"


def test_every_text_is_escaped_and_shows_what_a_page_cannot_hold() -> None:
    assert text(EVIL) == SAFE
    for markup in (
        facts([(EVIL, EVIL)]),
        tiles([(EVIL, EVIL)]),
        table([EVIL], [[EVIL]], n_left=1),
        details(EVIL, text(EVIL)),
        section(EVIL, EVIL, [text(EVIL)]),
        figure(EVIL, "", EVIL, [(EVIL, EVIL)]),
    ):
        assert EVIL not in markup
        assert "<i>" not in markup
        assert markup.count(SAFE) >= 2
