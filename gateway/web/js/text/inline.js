// What stands within a line of Markdown: emphasis, code, links. Pieces of text go to `put`, with the places in the source
// where they begin and end; a mark that is not closed is text. Bounds on lengths keep odd answers from costing seconds.

const SPECIAL = /[\\`![*_~]/g;
const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const CODE = /(?<!`)(`+)(?!`)(.{1,1000}?)(?<!`)\1(?!`)/y;
// Only addresses of the web become links; a picture is a link to it, because the page loads nothing from elsewhere.
const LINK = /!?\[([^[\]]{1,500})\]\((https?:\/\/(?:[^\s()<>]|\([^\s()<>]{0,200}\)){1,2000})(?:[ \t]+"[^"]{0,500}")?\)/iy;
const EMPHASIS = [
  /(\*{1,3})(?![\s*])(.{1,500}?)(?<![\s*])\1(?!\*)/y,
  /(?<!\w)(_{1,3})(?![\s_])(.{1,500}?)(?<![\s_])\1(?!\w)/y,
  /(~~)(?![\s~])(.{1,500}?)(?<![\s~])\1(?!~)/y,
];
const TAGS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"], "~~": ["del"] };

// Appends a text that begins at `start` of the source to `box`.
export function inline(text, start, box, put) {
  let [shown, at] = [0, 0];
  const until = (end) => end > shown && put(box, start + shown, start + end);
  for (;;) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(text);
    if (special === null) break;
    at = special.index;
    const found = marked(text, at);
    if (found === null) {
      at += 1;
      continue;
    }
    until(at);
    found.draw(box, start, put);
    at = shown = found.end;
  }
  until(text.length);
}

// The element that begins at a place, as where it ends and how it is drawn; null where none does.
function marked(text, at) {
  const match = (pattern) => {
    pattern.lastIndex = at;
    return pattern.exec(text);
  };
  const escaped = match(ESCAPED);
  if (escaped) return { end: at + 2, draw: (box, start, put) => put(box, start + at + 1, start + at + 2) };
  const code = match(CODE);
  if (code) {
    const from = at + code[1].length;
    return { end: at + code[0].length, draw: (box, start, put) => put(added(box, "code"), start + from, start + from + code[2].length) };
  }
  const link = match(LINK);
  if (link) {
    const from = at + link[0].indexOf("[") + 1;
    return { end: at + link[0].length, draw: (box, start, put) => inline(link[1], start + from, linked(box, link[2]), put) };
  }
  const emphasis = EMPHASIS.map(match).find((found) => found !== null);
  if (!emphasis) return null;
  const [whole, mark, inner] = emphasis;
  const draw = (box, start, put) => inline(inner, start + at + mark.length, (TAGS[mark] ?? TAGS[mark.length]).reduce(added, box), put);
  return { end: at + whole.length, draw };
}

function added(box, tag) {
  return box.appendChild(document.createElement(tag));
}

function linked(box, address) {
  const link = added(box, "a");
  link.href = address;
  link.rel = "noopener noreferrer";
  link.target = "_blank";
  return link;
}
