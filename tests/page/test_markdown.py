"""Markdown as elements: the common subset, what is not of it stays text, and a growing text comes out as the whole."""

import re

import pytest
from axe_playwright_python.async_playwright import Axe
from page.browser import visit
from playwright.async_api import Browser, Page, expect
from support.stack import RunningStack

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]

# Draws a text that comes in pieces, each of which is a token, into the box of the newest answer.
DRAW = """async (pieces) => {
  const { Rendered } = await import("/static/js/text/rendered.js");
  const box = document.querySelector("#lane-main .stream");
  box.replaceChildren();
  box.classList.add("rendered");
  const rendered = new Rendered(box, (parent, index, text) => parent.append(text), () => undefined);
  for (let count = 1; count <= pieces.length; count += 1) {
    rendered.draw({ tokens: pieces.slice(0, count).map((text) => ({ text })), rest: "" });
  }
  box.normalize();
  return box.innerHTML;
}"""
# For each token the pieces of it that are shown.
PIECES = """async (pieces) => {
  const { Rendered } = await import("/static/js/text/rendered.js");
  const found = pieces.map(() => "");
  const put = (parent, index, text) => { found[index] += text; };
  const rendered = new Rendered(document.createElement("div"), put, () => undefined);
  rendered.draw({ tokens: pieces.map((text) => ({ text })), rest: "\\n!" });
  return found;
}"""
ALL = """# Plan

First *one*, then **two**, `three`.
Next line

1. a
2. b

   more of b
   - deep
   - er
3. c

> said
> twice

| a | b |
|---|:-:|
| 1 | `2` |

---
```python
if a < b:

    print("**no**")
```
[link](https://example.org/a_(b)) ~~gone~~
"""


async def drawn(page: Page, pieces: list[str]) -> str:
    """The elements, without the furniture of code blocks and tables."""
    found = await page.evaluate(DRAW, pieces)
    for pattern in (r' class="[^"]*"', r' tabindex="0"', r"<button.*?</button>", r' rel="noopener noreferrer"'):
        found = re.sub(pattern, "", found)
    return found.replace(' target="_blank"', "")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a *b* **c** ~~e~~ `f`", "<p>a <em>b</em> <strong>c</strong> <del>e</del> <code>f</code></p>"),
        ("***d***", "<p><strong><em>d</em></strong></p>"),
        ("*a **b** c* and _d_", "<p><em>a <strong>b</strong> c</em> and <em>d</em></p>"),
        ("2 * 3 * 4 snake_case_name **open", "<p>2 * 3 * 4 snake_case_name **open</p>"),
        (r"\*no\* `\*` ``a`b``", r"<p>*no* <code>\*</code> <code>a`b</code></p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("# a\n### b ##\n#c", "<h3>a</h3><h5>b</h5><p>#c</p>"),
        ("- a\n* e", "<ul><li><p>a</p></li></ul><ul><li><p>e</p></li></ul>"),
        ("- b\n  - c\n\n  d", "<ul><li><p>b</p><ul><li><p>c</p></li></ul><p>d</p></li></ul>"),
        ("3. a\n\n4. b\nlazy\n\nend", '<ol start="3"><li><p>a</p></li><li><p>b<br>lazy</p></li></ol><p>end</p>'),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote>"),
        (
            "```py\na\n\n  b*c*\n```\nd",
            "<div><div><span>py</span></div><pre><code>a\n\n  b*c*</code></pre></div><p>d</p>",
        ),
        ("~~~\nopen", "<div><div><span>text</span></div><pre><code>open</code></pre></div>"),
        (
            "|a|b|\n|-|-|\n|*c*|d|",
            "<div><table><tr><th>a</th><th>b</th></tr><tr><td><em>c</em></td><td>d</td></tr></table></div>",
        ),
        ("a | b\nc", "<p>a | b<br>c</p>"),
        ("a\n***\nb", "<p>a</p><hr><p>b</p>"),
        ("[a *b*](https://c.de/f?g)", '<p><a href="https://c.de/f?g">a <em>b</em></a></p>'),
        ("![cat](http://c.de/cat.png)", '<p><a href="http://c.de/cat.png">cat</a></p>'),
    ],
)
async def test_the_common_subset_becomes_elements(page: Page, source: str, expected: str) -> None:
    """Emphasis, code, headings, lists in lists, quotes, tables and links; marks that are not closed are text."""
    assert await drawn(page, [source]) == expected


@pytest.mark.parametrize(
    "source",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[a](javascript:alert(1))",
        "[a](JavaScript:alert(1)) [b](data:text/html,<script>) [c](//d.e) [d](vbscript:x)",
        '[a](https://b.c" onclick=alert(1))',
        "![a](x onerror=alert(1))",
        "```<img src=x onerror=alert(1)>\n</code></pre><script>alert(1)</script>\n```",
        "| <b onclick=alert(1)> | <style>* {}</style> |\n|---|---|\n| &lt;b&gt; | <!-- a --> |",
        "<https://a.b> &amp; <a href=https://a.b>c</a>",
    ],
)
async def test_what_tries_to_be_more_than_text_stays_text(page: Page, source: str) -> None:
    """No element but those of Markdown, no attribute but those of the page, and links to nothing but the web."""
    await page.evaluate(DRAW, [source])
    tags = "p, br, em, strong, del, code, pre, div, span, button, table, tbody, tr, th, td"
    assert await page.locator(f"#lane-main .stream *:not({tags})").count() == 0
    names = await page.evaluate(
        "[...document.querySelectorAll('#lane-main .stream *')].flatMap((each) => each.getAttributeNames())"
    )
    assert set(names) <= {"class", "tabindex", "type", "aria-label", "role"}
    shown = await page.locator("#lane-main .stream").inner_text()
    for part in re.findall(r"<[a-z!/][^>]*>|&\w+;|javascript:", source):
        assert part in shown


@pytest.mark.parametrize("size", [1, 3, 7])
async def test_a_growing_text_comes_out_as_the_whole(page: Page, size: int) -> None:
    """Whatever the pieces are in which it comes, and however its end looked before."""
    whole = await drawn(page, [ALL])
    assert await drawn(page, [ALL[at : at + size] for at in range(0, len(ALL), size)]) == whole
    for tag in ("h3", "em", "strong", "ol", "ul", "blockquote", "table", "hr", "pre", "a", "del"):
        assert f"<{tag}" in whole


async def test_every_piece_stays_with_its_token(page: Page) -> None:
    """Marks are left out, and each other letter belongs to the token that brought it."""
    pieces = ["# He", "ad", "ing\n\n1", ". **", "bo", "ld** and", "", " `co", "de`", "\n\n```\n", "a\n", "b", "\n```"]
    shown = ["He", "ad", "ing", "", "bo", "ld and", "", " co", "de", "", "a\n", "b", ""]
    assert await page.evaluate(PIECES, pieces) == shown


@pytest.mark.parametrize("mark", ["*a ", "**", "`a", "[", "[a](", ">", "- ", "|", "  - a\n", "_a* ", "~~a ", "> - "])
async def test_no_text_is_too_odd_to_be_drawn(page: Page, mark: str) -> None:
    """A thousand marks that are never closed, or that would nest without end, end as text."""
    await page.evaluate(DRAW, [mark * 2_000])
    depth = await page.evaluate(
        "Math.max(...[...document.querySelectorAll('#lane-main .stream *')].map((each) => {"
        " let depth = 0; for (let at = each; at.className !== 'stream rendered'; at = at.parentElement) depth += 1;"
        " return depth; }))"
    )
    assert depth < 40


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
async def test_everybody_can_read_it(browser: Browser, stack: RunningStack, scheme: str, width: int) -> None:
    """Everything is seen, axe has no serious finding, and wide tables and code scroll within themselves."""
    window = {"width": width, "height": 740}
    async with visit(browser, stack.gateway.rest_address, color_scheme=scheme, viewport=window) as page:
        await page.evaluate(DRAW, [ALL.replace("print", "print" * 60).replace("| 1 |", f"| {'w' * 300} |")])
        await page.evaluate("for (const id of ['openers', 'lane-main']) document.getElementById(id).hidden = false")
        for tag in ("h3", "ol", "ul", "blockquote", "table", "pre", "a"):
            await expect(page.locator(f"#lane-main .stream {tag}").first).to_be_visible()
        results = await Axe().run(page)
        found = [each for each in results.response["violations"] if each["impact"] in {"serious", "critical"}]
        assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found] == []
        assert await page.evaluate("document.documentElement.scrollWidth") <= width


async def test_a_code_block_is_copied_as_it_was_written(browser: Browser, stack: RunningStack) -> None:
    """Without fences and marks, and the button says so."""
    async with visit(browser, stack.gateway.rest_address, permissions=["clipboard-read", "clipboard-write"]) as page:
        await page.evaluate(DRAW, [ALL])
        await page.get_by_role("button", name="Copy code").click()
        await expect(page.locator("#lane-main .code button")).to_have_text("Copied")
        assert await page.evaluate("navigator.clipboard.readText()") == 'if a < b:\n\n    print("**no**")'
