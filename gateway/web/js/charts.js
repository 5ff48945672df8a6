// The three charts. Each draws what a run adds up to; numbers stand beside every shape.

import { count, percent, plural, time } from "./format.js";

const MOST_ROUNDS = 160;
const [WIDTH, HEIGHT, USUAL_MOST] = [320, 64, 8];

export function drawPositions(list, run) {
  while (list.childElementCount > run.positions.length) list.lastElementChild.remove();
  for (const [place, { drafted, accepted }] of run.positions.entries()) {
    const row = list.children[place] ?? list.appendChild(position(place));
    row.querySelector("i").style.width = `${(100 * accepted) / drafted}%`;
    row.querySelector(".share").textContent = percent(accepted / drafted);
    row.querySelector(".number").textContent = `${count(accepted)} of ${count(drafted)}`;
  }
}

function position(place) {
  const row = document.createElement("li");
  const [name, track, share, number] = ["b", "span", "b", "span"].map((tag) => row.appendChild(document.createElement(tag)));
  name.textContent = String(place + 1);
  track.className = "track";
  track.append(document.createElement("i"));
  share.className = "share";
  number.className = "number";
  return row;
}

export function drawTimes(bar, list, run) {
  const total = run.times.draft + run.times.verify + run.times.wire;
  if (bar.childElementCount === 0) bar.append(...Object.keys(run.times).map(segment));
  const told = [];
  for (const [index, [name, us]] of Object.entries(run.times).entries()) {
    const share = total ? us / total : 0;
    const mean = run.passes ? `${time(us / run.passes)}, ${percent(share)}` : "–";
    bar.children[index].style.width = `${(100 * share).toFixed(2)}%`;
    list.querySelector(`[data-time="${name}"]`).textContent = mean;
    told.push(`${name} ${mean}`);
  }
  bar.setAttribute("aria-label", run.passes ? told.join("; ") : "No rounds yet");
}

function segment(name) {
  const part = document.createElement("i");
  part.className = name;
  return part;
}

export function drawCounts(svg, range, run) {
  const rounds = run.rounds.slice(1).slice(-MOST_ROUNDS);
  const asked = rounds.map((round) => round.draft_count);
  const most = Math.max(USUAL_MOST, ...asked);
  svg.querySelector(".asked").setAttribute("d", steps(asked, most));
  svg.querySelector(".kept").setAttribute("d", area(rounds.map((round) => round.accepted_count), most));
  if (asked.length === 0) {
    range.textContent = "–";
    return;
  }
  const told = `now ${asked.at(-1)}, ${Math.min(...asked)} to ${Math.max(...asked)} over the last ${plural(asked.length, "round")}`;
  range.textContent = told;
  svg.setAttribute("aria-label", `Guesses a round: ${told}`);
}

function height(value, most) {
  return (HEIGHT - 2 - (value / most) * (HEIGHT - 4)).toFixed(1);
}

function steps(values, most) {
  const step = WIDTH / Math.max(values.length, 24);
  return values.map((value, index) => `${index ? "V" : "M0 "}${height(value, most)}H${((index + 1) * step).toFixed(1)}`).join("");
}

function area(values, most) {
  return values.length ? `${steps(values, most)}V${HEIGHT}H0Z` : "";
}
