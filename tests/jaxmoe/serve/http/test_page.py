# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The page of the endpoint: its scripts by Node.js, where that is installed, and its policy."""

import base64
import hashlib
import json
import re
import shutil
import subprocess

import pytest

from jaxmoe.serve.http.page import whole_page
from tests.support.source_tree import ROOT

FOLDER = ROOT / "jaxmoe/serve/http/page"
needs_node = pytest.mark.skipif(
    shutil.which("node") is None, reason="Node.js is not installed: no script can be run"
)
# Elements as the scripts use them, written as HTML.
DOCUMENT = """
const page = {
  createTextNode: (text) => ({ html: () => text.replace(/&/g, "&amp;").replace(/</g, "&lt;") }),
  createElement: (tag) => ({
    children: [], dataset: {}, style: {},
    append(...nodes) { this.children.push(...nodes); },
    set textContent(text) { this.children = [page.createTextNode(text)]; },
    html() {
      const href = this.href ? ` href="${this.href}"` : "";
      return `<${tag}${href}>${this.children.map((node) => node.html()).join("")}</${tag}>`;
    },
  }),
};
const render = (text) => toNodes(parseMarkdown(text), page).map((node) => node.html()).join("");
"""


def run_node(script, *names):
    """Return the JSON that a script prints behind some of the page's."""
    source = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in names)
    done = subprocess.run(
        ["node", "-"],
        input=f"{source}\n{script}",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def render(*texts):
    script = f"{DOCUMENT} console.log(JSON.stringify({json.dumps(texts)}.map(render)));"
    return run_node(script, "markdown.js")


MARKDOWN = {
    "plain *em* **strong** _em_ __strong__ ~~del~~ `code`": "<p>plain <em>em</em> <strong>strong"
    "</strong> <em>em</em> <strong>strong</strong> <del>del</del> <code>code</code></p>",
    "**bold with *em* in it**": "<p><strong>bold with <em>em</em> in it</strong></p>",
    "snake_case_name and 2 * 3 * 4 and *": "<p>snake_case_name and 2 * 3 * 4 and *</p>",
    r"\*no em\* and a\_b": "<p>*no em* and a_b</p>",
    "# One\n### Three ###\ntext": "<h1>One</h1><h3>Three</h3><p>text</p>",
    "# C#\n## #\n#": "<h1>C#</h1><h2></h2><p>#</p>",
    "a\nb\n\nc": "<p>a<br></br>b</p><p>c</p>",
    "```python\na < b\n\n  c\n```\nd": "<pre><code>a &lt; b\n\n  c</code></pre><p>d</p>",
    "~~~\nit grows": "<pre><code>it grows</code></pre>",
    "- a\n- b\n  - c\n\n  more\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul><p>more</p></li>"
    "<li>d</li></ul>",
    "3. a\n4. b\ntext": "<ol><li>a</li><li>b<br></br>text</li></ol>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "a | b\n--|--:\n1 | `x\\|y`": "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>x|y"
    "</code></td></tr></table>",
    "a\n\n---\nb": "<p>a</p><hr></hr><p>b</p>",
    "[a *b*](https://x.y/z) https://u.v.": '<p><a href="https://x.y/z">a <em>b</em></a> '
    '<a href="https://u.v">https://u.v</a>.</p>',
    "in 2024. there": "<p>in 2024. there</p>",
}


@needs_node
def test_markdown_becomes_elements():
    for text, html in zip(MARKDOWN, render(*MARKDOWN), strict=True):
        assert html == MARKDOWN[text], text


@needs_node
def test_no_text_becomes_a_part_of_the_page():
    """Tags and addresses of scripts stay text."""
    texts = [
        "<script>alert(1)</script>",
        '<img src=x onerror="alert(1)">',
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1)) [b](data:text/html,x) [c]( javascript:x)",
        "```<b>\n<i>\n```",
        '[x](https://a"onclick="alert(1))',
    ]
    for text, html in zip(texts, render(*texts), strict=True):
        tags = set(re.findall(r"<(\w+)", html))
        assert tags <= {"p", "pre", "code", "a"}, text
        assert all(href.startswith("https://") for href in re.findall(r'href="([^"]*)', html)), text


@needs_node
def test_long_and_deep_answers_are_read_in_time_in_proportion():
    """The characters of a text of 200 thousand, of nested marks and of marks without an end."""
    texts = ["*" * 2000, "> " * 5000 + "x", "[" * 5000, "`" * 3000, "- " * 3000, "a*b_c" * 2000]
    texts += ["# a" + " " * 20_000 + "b", "# " + "#" * 20_000 + "b"]
    script = (
        f"{DOCUMENT} const texts = {json.dumps(texts)};"
        " console.log(JSON.stringify(texts.map((text) => render(text).length)));"
    )
    assert all(length > 0 for length in run_node(script, "markdown.js"))


CONVERSATION = """
(async () => {
  const turns = [];
  for (let i = 0; i < 9; i += 1)
    turns.push({ role: i % 2 ? "assistant" : "user", content: "x".repeat(10) });
  let calls = 0;
  const count = async (part) => { calls += 1; return 10 * part.length + 5; };
  const clip = async (length, most) => {
    calls = 0;
    const { turns: kept, numLeftOut } = await clipTurns(turns, count, length, most);
    return [kept.length, numLeftOut, kept[0].role, calls];
  };
  const stream = eventsOf(
    'data: {"a": 1}\\n\\nevent: x\\ndata: {"a": 2}\\n\\ndata: [DONE]\\n\\ndata: {"a"',
  );
  const named = samplingFields({
    temperature: "0.5", top_k: " 4 ", seed: "", stop_strings: "a\\nb\\n", min_p: "x",
  });
  console.log(JSON.stringify({
    whole: await clip(400, 0), some: await clip(100, 0), asked: await clip(100, 10),
    least: await clip(16, 200), stream, named,
    system: withSystem("Be brief.", [{ role: "user", content: "a", element: 1 }]),
    plain: withSystem(" ", []),
    shares: loadShares([[1, 3, 0, 0], [0, 0, 0, 0]]), median: [median([3, 1, 2]), median([])],
  }));
})();
"""


@needs_node
def test_a_conversation_is_clipped_to_the_room_that_is_left():
    found = run_node(CONVERSATION, "conversation.js")
    assert found["whole"] == [9, 0, "user", 1]
    # 75 of 100 tokens may be read: 7 turns are 75 tokens. A turn of the user comes first.
    assert found["some"][:3] == [7, 2, "user"] and found["some"][3] <= 4
    assert found["asked"][:3] == [7, 2, "user"]
    assert found["least"][:3] == [1, 8, "user"], "the last turn stays"
    assert found["stream"] == {"events": [{"a": 1}, {"a": 2}], "rest": 'data: {"a"'}
    assert found["named"] == {"temperature": 0.5, "top_k": 4, "stop": ["a", "b"]}
    assert [message["role"] for message in found["system"]] == ["system", "user"]
    assert found["system"][1] == {"role": "user", "content": "a"} and found["plain"] == []
    assert found["median"] == [2, None]


# The page as its scripts see it: elements that do nothing, and an answer that never ends.
BROWSER = """
const element = () => ({
  value: "", children: [], classList: { toggle() {} }, style: {}, dataset: {},
  append(...nodes) { this.children.push(...nodes); }, remove() {}, setAttribute() {}, focus() {},
  replaceChildren() {}, querySelectorAll: () => [], getContext: () => ({ fillRect() {} }),
});
const elements = {};
globalThis.document = {
  hidden: true, documentElement: {}, createElement: element, createTextNode: (text) => text,
  getElementById: (id) => (elements[id] ??= element()),
};
globalThis.location = { search: "" };
globalThis.localStorage = { getItem: () => null, setItem() {} };
globalThis.matchMedia = () => ({ matches: false });
globalThis.setInterval = globalThis.requestAnimationFrame = () => 0;
const part = 'data: {"choices": [{"text": "half"}]}\\n\\n';
globalThis.fetch = async (path, options) => {
  if (path === "/tokenize") return Response.json({ tokens: [1] });
  if (path !== "/v1/completions") throw new Error("no server");
  return new Response(new ReadableStream({
    start(stream) {
      stream.enqueue(new TextEncoder().encode(part));
      options.signal.onabort = () => stream.error(options.signal.reason);
    },
  }));
};
"""
ENDED = """
const settle = () => new Promise((resolve) => setTimeout(resolve, 50));
const talk = async (end) => {
  $("text").value = "question";
  send();
  await settle();
  end();
  await settle();
  return turns.map(({ role, content }) => [role, content]);
};
maxLength = 100;
(async () => {
  const stopped = await talk(() => $("stop").onclick());
  console.log(JSON.stringify([stopped, await talk(reset)]));
})();
"""


@needs_node
def test_an_answer_that_grows_is_no_part_of_the_next_conversation():
    """What was written until the user stops it stays; nothing of it after a new beginning."""
    names = ("conversation.js", "markdown.js", "page.js")
    scripts = [(FOLDER / name).read_text(encoding="utf-8") for name in names]
    stopped, reset = run_node("\n".join([BROWSER, *scripts, ENDED]))
    assert stopped == [["user", "question"], ["assistant", "half"]] and reset == []


@needs_node
def test_loads_are_shares_of_the_fair_share():
    first, second = run_node(CONVERSATION, "conversation.js")["shares"]
    assert first == {"shares": [1, 3, 0, 0], "most": 1, "least": 2, "idle": 2}
    assert second["shares"] == [0, 0, 0, 0]


def test_a_browser_runs_the_scripts_of_the_page_alone():
    page, policy = whole_page()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert not re.findall(r"""(?:src|href)=["']?http""", page), "nothing comes from elsewhere"
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page


def test_every_element_that_the_scripts_name_is_on_the_page():
    page, _ = whole_page()
    ids = set(re.findall(r'\bid="(\w+)"', page))
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    sampling = re.search(r"const SAMPLING = \[(.*?)\]", script, re.DOTALL)
    assert sampling is not None
    names = set(re.findall(r'\$\("(\w+)"\)', script)) | set(re.findall(r'"(\w+)"', sampling[1]))
    assert names <= ids and len(names) > 25
