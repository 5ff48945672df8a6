// Why a round had so many guesses: the reason in a sentence, and as a table what was compared then.

import { count, name, plural, rate, time } from "./format.js";
import { made } from "./trees.js";

const KINDS = { chain: "chains", tree: "trees", ahead: "chains, ahead" };
const HEADS = ["drafter", "guesses", "tokens a round", "round takes", "tokens/s"];

// The number of a round, as a button that opens its choice below.
export function whyButton(round, choice, row) {
  const button = made("button", "number", count(round.index));
  button.type = "button";
  button.title = choice.reason;
  button.setAttribute("aria-label", `${count(round.index)}: why ${asked(choice)}?`);
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") === "true";
    if (open) row.querySelector(".because").remove();
    else row.append(drawChoice(choice));
    button.setAttribute("aria-expanded", String(!open));
  });
  return button;
}

function asked(choice) {
  return choice.draft_count === 0 ? "plain decoding" : plural(choice.draft_count, "guess");
}

function drawChoice(choice) {
  const box = made("div", "because");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `Why ${asked(choice)}`);
  box.append(made("p", "", `${choice.reason}${beside(choice)}`));
  if (choice.drafters.length > 0) box.append(table(choice));
  return box;
}

function beside(choice) {
  if (choice.to_beat !== null) {
    return ` To beat were ${rate(choice.to_beat)} tokens/s; other sessions lose ${choice.row_price.toFixed(3)} tokens a row.`;
  }
  return choice.plain_budget > 0 ? ` Up to ${plural(choice.plain_budget, "token")} may come plainly without being asked for.` : "";
}

function table(choice) {
  const [found, head, body] = [made("table", ""), made("thead", ""), made("tbody", "")];
  head.append(line("th", HEADS));
  const add = (who, isChosen, { draft_count, tokens, round_us, tokens_per_s }) => {
    const row = line("td", [who, `${isChosen ? "✓ " : ""}${draft_count}`, tokens.toFixed(2), time(round_us), rate(tokens_per_s)]);
    row.classList.toggle("chosen", isChosen);
    body.append(row);
  };
  const { plain_us } = choice;
  if (plain_us !== null) add("plain decoding", choice.draft_count === 0, { draft_count: 0, tokens: 1, round_us: plain_us, tokens_per_s: 1e6 / plain_us });
  for (const drafter of choice.drafters) {
    const isIts = ["drafter", "place", "makes"].every((key) => drafter[key] === choice[key]);
    drafter.candidates.forEach((each, place) => add(place === 0 ? title(drafter) : "", isIts && each.draft_count === choice.draft_count, each));
  }
  found.append(head, body);
  return found;
}

function title(drafter) {
  const standing = !drafter.is_worth ? ", not worth it" : drafter.is_allowed ? "" : ", not yet for one more";
  return `${name(drafter.drafter)} (${KINDS[drafter.makes]})${standing}`;
}

function line(tag, cells) {
  const row = made("tr", "");
  for (const cell of cells) {
    const each = made(tag, "", cell);
    if (tag === "th") each.scope = "col";
    row.append(each);
  }
  return row;
}
