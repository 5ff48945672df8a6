// The common subset of Markdown, CommonMark's and GitHub's tables, as elements. They are made one by one and only ever
// given text, so nothing that a model says can be markup of the page.

import { flash, toClipboard } from "../copying.js";
import { inline } from "./inline.js";
import { made } from "../trees.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^ {0,3}([-*+]|\d{1,9}[.)])(?:[ \t]{1,4}|$)/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const CELL = /(?:\\.|[^|\\])+/g;
// Of lists in lists and quotes in quotes; what is deeper is text.
const DEEPEST = 8;
// Headings of an answer stand below the page's own.
const TOP_LEVEL = 2;

// A line knows where in the source it begins.
export function lines(text, start) {
  let at = start;
  return text.split("\n").map((line) => {
    const found = { text: line, start: at };
    at += line.length + 1;
    return found;
  });
}

// The blocks of some lines; each has the place in the source where it begins.
export function blocks(all, depth = 0) {
  const found = [];
  for (let at = textAt(all, 0); at < all.length; at = textAt(all, found.at(-1).next)) {
    found.push({ start: all[at].start, ...(depth < DEEPEST ? block(all, at, depth) : paragraph(all, at, () => false)) });
  }
  return found;
}

function block(all, at, depth) {
  const { text } = all[at];
  const fence = FENCE.exec(text);
  if (fence) return code(all, at, fence);
  const heading = HEADING.exec(text);
  if (heading) return { kind: "heading", level: heading[1].length, line: after(all[at], heading[0].length), next: at + 1 };
  if (RULE.test(text)) return { kind: "rule", next: at + 1 };
  if (ITEM.test(text)) return list(all, at, depth);
  if (QUOTE.test(text)) return quote(all, at, depth);
  if (begins(all, at)) return table(all, at);
  return paragraph(all, at, (place) => opens(all[place].text) || begins(all, place));
}

function code(all, at, [, fence, language]) {
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
  const end = all.findIndex((line, place) => place > at && closing.test(line.text));
  const next = end < 0 ? all.length : end + 1;
  return { kind: "code", language: language.trim(), lines: all.slice(at + 1, end < 0 ? all.length : end), next };
}

function quote(all, at, depth) {
  let next = at;
  while (next < all.length && QUOTE.test(all[next].text)) next += 1;
  return { kind: "quote", blocks: blocks(all.slice(at, next).map((line) => after(line, QUOTE.exec(line.text)[0].length)), depth + 1), next };
}

function list(all, at, depth) {
  const [, first] = ITEM.exec(all[at].text);
  const same = (line) => line !== undefined && !RULE.test(line.text) && ITEM.exec(line.text)?.[1].at(-1) === first.at(-1);
  const items = [];
  let next = at;
  for (let place = at; same(all[place]); place = textAt(all, next)) {
    const own = [after(all[place], ITEM.exec(all[place].text)[0].length)];
    for (next = place + 1; belongs(all, next); next += 1) own.push(after(all[next], Math.min(indent(all[next].text), all[place].text.length - own[0].text.length)));
    items.push(blocks(own, depth + 1));
  }
  return { kind: "list", first: first.length > 1 ? Number.parseInt(first, 10) : null, items, next };
}

// Whether a line goes on with the item above it: indented text, what follows a paragraph's line, and blanks between them.
function belongs(all, at) {
  if (at >= all.length) return false;
  if (all[at].text.trim() !== "") return indent(all[at].text) >= 2 || (all[at - 1].text.trim() !== "" && !opens(all[at].text));
  const next = textAt(all, at);
  return next < all.length && indent(all[next].text) >= 2;
}

function table(all, at) {
  let next = at + 2;
  while (next < all.length && all[next].text.includes("|")) next += 1;
  const rows = [all[at], ...all.slice(at + 2, next)].map((line) => {
    const bare = line.text.replace(/^ *\|/, "").replace(/\| *$/, "");
    const start = line.start + line.text.indexOf(bare);
    return [...bare.matchAll(CELL)].map((cell) => {
      const text = cell[0].trimEnd();
      return after({ text, start: start + cell.index }, indent(text));
    });
  });
  return { kind: "table", rows, next };
}

function paragraph(all, at, ends) {
  let next = at + 1;
  while (next < all.length && all[next].text.trim() !== "" && !ends(next)) next += 1;
  return { kind: "paragraph", lines: all.slice(at, next), next };
}

function begins(all, at) {
  return all[at].text.includes("|") && (all[at + 1]?.text.includes("|") ?? false) && DIVIDER.test(all[at + 1].text);
}

function opens(text) {
  return [FENCE, HEADING, RULE, ITEM, QUOTE].some((pattern) => pattern.test(text));
}

function textAt(all, from) {
  let at = from;
  while (at < all.length && all[at].text.trim() === "") at += 1;
  return at;
}

function indent(text) {
  return text.length - text.trimStart().length;
}

function after(line, count) {
  return { text: line.text.slice(count), start: line.start + count };
}

// A block as an element; `put(box, from, to)` appends the source between two places to a box.
export function drawBlock(found, put) {
  return DRAWN[found.kind](found, put);
}

const DRAWN = {
  heading({ level, line }, put) {
    const box = made(`h${Math.min(6, level + TOP_LEVEL)}`, "");
    inline(line.text.replace(/[ \t]+#*[ \t]*$/, ""), line.start, box, put);
    return box;
  },
  rule: () => made("hr", ""),
  paragraph(found, put) {
    const box = made("p", "");
    for (const [place, line] of found.lines.entries()) {
      if (place > 0) box.append(document.createElement("br"));
      inline(line.text.trim(), line.start + indent(line.text), box, put);
    }
    return box;
  },
  quote(found, put) {
    const box = made("blockquote", "");
    box.append(...found.blocks.map((each) => drawBlock(each, put)));
    return box;
  },
  list({ first, items }, put) {
    const box = made(first === null ? "ul" : "ol", "");
    if (first !== null) box.start = first;
    for (const item of items) box.appendChild(made("li", "")).append(...item.map((each) => drawBlock(each, put)));
    return box;
  },
  table({ rows }, put) {
    const box = made("div", "table");
    box.tabIndex = 0;
    const body = box.appendChild(made("table", ""));
    for (const [place, cells] of rows.entries()) {
      const row = body.appendChild(made("tr", ""));
      for (const cell of cells) inline(cell.text, cell.start, row.appendChild(made(place ? "td" : "th", "")), put);
    }
    return box;
  },
  code(found, put) {
    const box = made("div", "code");
    const head = box.appendChild(made("div", "code-head"));
    const copy = made("button", "small", "Copy");
    copy.type = "button";
    copy.setAttribute("aria-label", "Copy code");
    copy.addEventListener("click", async () => {
      flash(copy, (await toClipboard(found.lines.map((line) => line.text).join("\n"))) ? "Copied" : "Not copied");
    });
    head.append(made("span", "", found.language || "text"), copy);
    const text = made("pre", "");
    text.tabIndex = 0;
    box.append(text);
    const inner = text.appendChild(document.createElement("code"));
    for (const [place, line] of found.lines.entries()) {
      put(inner, line.start, line.start + line.text.length + (place < found.lines.length - 1 ? 1 : 0));
    }
    return box;
  },
};
