// Copyright 2026 The jaxmoe authors
// SPDX-License-Identifier: Apache-2.0
"use strict";

// Markdown of answers as nodes of the page. `parseMarkdown` returns plain objects
//     { tag, children, [href], [text], [align], [start] }
// and `toNodes` makes elements of them: text goes into text nodes, and only tags and addresses that
// are named here come out, so that no text of a model becomes a part of the page.

const LINK = /^(https?:\/\/|mailto:)/i;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+(.*)|)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const HEADING = /^ {0,3}(#{1,6})(\s.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 12;

function parseMarkdown(text) {
  return parseBlocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function parseBlocks(lines, depth) {
  const blocks = [];
  let paragraph = [];
  const close = () => {
    if (paragraph.length) blocks.push({ tag: "p", children: parseInline(paragraph.join("\n")) });
    paragraph = [];
  };
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    let match;
    if (!line.trim()) {
      close();
      at += 1;
    } else if ((match = FENCE.exec(line))) {
      close();
      const content = [];
      const [, mark, language] = match;
      const end = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}\\s*$`);
      for (at += 1; at < lines.length && !end.test(lines[at]); at += 1) content.push(lines[at]);
      at += 1; // an answer that still grows may have no end
      blocks.push({ tag: "pre", language, text: content.join("\n") });
    } else if ((match = HEADING.exec(line))) {
      close();
      blocks.push({ tag: `h${match[1].length}`, children: parseInline(headingText(match[2])) });
      at += 1;
    } else if (RULE.test(line)) {
      close();
      blocks.push({ tag: "hr", children: [] });
      at += 1;
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      close();
      const content = [];
      for (; at < lines.length && (match = QUOTE.exec(lines[at])); at += 1) content.push(match[1]);
      blocks.push({ tag: "blockquote", children: parseBlocks(content, depth + 1) });
    } else if (startsList(line, paragraph) && depth < DEEPEST) {
      close();
      const list = parseList(lines, at, depth);
      blocks.push(list.block);
      at = list.end;
    } else if (line.includes("|") && at + 1 < lines.length && isTable(line, lines[at + 1])) {
      close();
      const table = parseTable(lines, at);
      blocks.push(table.block);
      at = table.end;
    } else {
      paragraph.push(line.trim());
      at += 1;
    }
  }
  close();
  return blocks;
}

// The text of a heading without the marks that close it, behind a space. A loop, because an
// expression that looks for spaces at the end takes the square of their number or worse.
function headingText(text) {
  const whole = text.trim();
  let end = whole.length;
  while (whole[end - 1] === "#") end -= 1;
  return /^\s?$/.test(whole[end - 1] ?? "") ? whole.slice(0, end).trim() : whole;
}

// Within a paragraph a list begins only with a mark that is no year at the begin of a line.
function startsList(line, paragraph) {
  const match = ITEM.exec(line);
  return Boolean(match) && (!paragraph.length || (match[3] && !/^(?!1[.)])\d/.test(match[2])));
}

function parseList(lines, start, depth) {
  const [, space, mark] = ITEM.exec(lines[start]);
  const isOrdered = /\d/.test(mark);
  const indent = space.length;
  const items = [];
  let at = start;
  for (; at < lines.length; at += 1) {
    const line = lines[at];
    const match = ITEM.exec(line);
    const depthOfLine = line.length - line.trimStart().length;
    if (match && depthOfLine <= indent + 1) {
      if (/\d/.test(match[2]) !== isOrdered || depthOfLine < indent || RULE.test(line)) break;
      const width = line.length - (match[3] ?? "").length;
      items.push({ width, lines: [match[3] ?? ""] });
    } else if (!line.trim()) {
      const next = lines.slice(at + 1).find((other) => other.trim());
      const isInside = next && (ITEM.test(next) || next.startsWith(" ".repeat(indent + 2)));
      if (!isInside) break;
      items.at(-1).lines.push("");
    } else if (depthOfLine > indent || lines[at - 1].trim()) {
      const item = items.at(-1);
      item.lines.push(line.slice(Math.min(depthOfLine, item.width)));
    } else break;
  }
  const children = items.map((item) => {
    const blocks = parseBlocks(item.lines, depth + 1);
    const isPlain = blocks[0]?.tag === "p"; // its text stands beside the mark
    return { tag: "li", children: isPlain ? [...blocks[0].children, ...blocks.slice(1)] : blocks };
  });
  const block = { tag: isOrdered ? "ol" : "ul", children };
  if (isOrdered) block.start = parseInt(mark, 10);
  return { block, end: at };
}

function isTable(line, delimiters) {
  return DELIMITERS.test(delimiters) && cellsOf(delimiters).length === cellsOf(line).length;
}

function cellsOf(line) {
  const cells = [];
  let cell = "";
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  for (let at = 0; at < inner.length; at += 1) {
    if (inner[at] === "\\" && inner[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (inner[at] === "|") {
      cells.push(cell.trim());
      cell = "";
    } else cell += inner[at];
  }
  return [...cells, cell.trim()];
}

function parseTable(lines, start) {
  const align = cellsOf(lines[start + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left",
  );
  const row = (line, tag) => ({
    tag: "tr",
    children: align.map((side, column) => ({
      tag,
      align: side,
      children: parseInline(cellsOf(line)[column] ?? ""),
    })),
  });
  const rows = [row(lines[start], "th")];
  let at = start + 2;
  for (; at < lines.length && lines[at].includes("|") && lines[at].trim(); at += 1)
    rows.push(row(lines[at], "td"));
  return { block: { tag: "table", children: rows }, end: at };
}

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

function parseInline(text, depth = 0) {
  const parts = [];
  let plain = "";
  const flush = () => {
    if (plain) parts.push({ text: plain });
    plain = "";
  };
  const push = (part) => {
    flush();
    parts.push(part);
  };
  for (let at = 0; at < text.length; ) {
    const rest = text.slice(at, at + 2000); // a mark that is not closed until then is text
    const character = text[at];
    let match;
    if (character === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (character === "`" && (match = /^(`+)([^]*?[^`])\1(?!`)/.exec(rest))) {
      push({ tag: "code", children: [{ text: match[2].replace(/\n/g, " ").replace(/^ (.+) $/, "$1") }] });
      at += match[0].length;
    } else if (character === "[" && (match = /^\[((?:[^[\]]|\[[^\]]*\])*)\]\((\S+?)\)/.exec(rest))) {
      const children = depth < DEEPEST ? parseInline(match[1], depth + 1) : [{ text: match[1] }];
      if (LINK.test(match[2])) push({ tag: "a", href: match[2], children });
      else plain += match[0];
      at += match[0].length;
    } else if (character === "h" && (match = /^https?:\/\/[^\s<>"'`)\]]*[^\s<>"'`)\].,;:!?]/.exec(rest))) {
      push({ tag: "a", href: match[0], children: [{ text: match[0] }] });
      at += match[0].length;
    } else if (character === "\n") {
      push({ tag: "br", children: [] });
      at += 1;
    } else {
      const span = depth < DEEPEST && spanAt(text, at, rest);
      if (span) {
        push({ tag: span.tag, children: parseInline(span.text, depth + 1) });
        at = span.end;
      } else {
        plain += character;
        at += 1;
      }
    }
  }
  flush();
  return parts;
}

// An emphasis at a place: no space inside its marks, and no word around underscores.
function spanAt(text, at, rest) {
  for (const [mark, tag] of MARKS) {
    if (!rest.startsWith(mark) || /\s|^$/.test(rest[mark.length] ?? "")) continue;
    if (mark.startsWith("_") && /\w/.test(text[at - 1] ?? "")) continue;
    for (let end = mark.length + 1; (end = rest.indexOf(mark, end)) > 0; end += 1) {
      const isLonger = mark.length === 1 && (rest[end + 1] === mark || rest[end - 1] === mark);
      if (isLonger || /\s/.test(rest[end - 1])) continue;
      if (mark.startsWith("_") && /\w/.test(rest[end + mark.length] ?? "")) continue;
      return { tag, text: rest.slice(mark.length, end), end: at + end + mark.length };
    }
  }
  return null;
}

function toNodes(parts, page = document) {
  return parts.map((part) => {
    if (part.tag === undefined) return page.createTextNode(part.text);
    const element = page.createElement(part.tag);
    if (part.tag === "pre") {
      const code = page.createElement("code");
      code.textContent = part.text;
      element.append(code);
      if (part.language) element.dataset.language = part.language;
      return element;
    }
    if (part.href) {
      element.href = part.href;
      element.target = "_blank";
      element.rel = "noopener noreferrer nofollow";
    }
    if (part.align) element.style.textAlign = part.align;
    if (part.start > 1) element.start = part.start;
    element.append(...toNodes(part.children, page));
    return element;
  });
}
