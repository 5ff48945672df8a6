// An answer as Markdown in which every piece of a token keeps its token. Blocks that can still change are drawn again.

import { blocks, drawBlock, lines } from "./markdown.js";

// The last block may grow, and the one before it may still take it in: an item of a list, for example.
const OPEN_BLOCKS = 2;

export class Rendered {
  // `piece(box, index, text)` appends a part of a token, `again(index)` gets from which token on all are drawn anew.
  constructor(box, piece, again) {
    this.box = box;
    this.piece = piece;
    this.again = again;
    this.text = "";
    this.starts = [];
    this.kept = 0;
    this.settled = 0;
  }

  draw(run) {
    for (let index = this.starts.length; index < run.tokens.length; index += 1) {
      this.starts.push(this.text.length);
      this.text += run.tokens[index].text;
    }
    // What was held back until the end belongs to no token.
    const whole = this.text + run.rest;
    const found = blocks(lines(whole.slice(this.settled), this.settled));
    while (this.box.childElementCount > this.kept) this.box.lastElementChild.remove();
    this.again(this.at(this.settled));
    this.box.append(...found.map((block) => drawBlock(block, (box, from, to) => this.put(whole, box, from, to))));
    const open = found.slice(-OPEN_BLOCKS);
    this.kept += found.length - open.length;
    this.settled = open[0]?.start ?? this.settled;
  }

  // The first token that does not end before a place.
  at(place) {
    let [low, high] = [0, this.starts.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((this.starts[middle + 1] ?? this.text.length) > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  put(whole, box, from, to) {
    let place = from;
    for (let index = this.at(from); index < this.starts.length && this.starts[index] < to; index += 1) {
      const end = Math.min(to, this.starts[index + 1] ?? this.text.length);
      if (end > place) this.piece(box, index, whole.slice(place, end));
      place = Math.max(place, end);
    }
    if (place < to) box.append(whole.slice(place, to));
  }
}
