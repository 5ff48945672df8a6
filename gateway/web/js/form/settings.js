// The form, which both views share: presets, what it asks for, and the link that fills it in. A link never runs anything.

import { made } from "../trees.js";
import { PARSED } from "./parsing.js";
import { PRESETS } from "./presets.js";

const PROMISES = {
  match: "match: the very tokens of plain decoding with the same seed.",
  ratio: "ratio: the target's own distribution; the tokens depend on the draft too.",
  block: "block: the target's own distribution, and more guesses kept; the tokens depend on the draft too.",
  lenient: "lenient: keeps more guesses, and does not follow the target's distribution.",
  typical: "typical: keeps what the target finds likely enough, and does not follow its distribution.",
};
// Left empty, what is the model's to say. The field shows it, and the request says nothing.
const RECOMMENDED = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"];
const NUMBERS = [...RECOMMENDED, "presence_penalty", "frequency_penalty", "min_tokens"];
const LISTS = ["banned_words", "stop_token_ids", "logit_bias"];
const OF_RULES = { lenient: ["lenience"], typical: ["typical_epsilon", "typical_delta"] };
const CALLS = ["tools", "tool_choice"];
// Of a tool that must be called.
const NAMED = "function ";
// What a link does not name is as on a fresh page.
const EMPTY = ["drafter", ...NUMBERS, ...Object.values(OF_RULES).flat(), "seed", "stop_strings", ...LISTS, "schema", ...CALLS, "system", "message"];
const DEFAULTS = { ...PRESETS[0], ...Object.fromEntries(EMPTY.map((name) => [name, ""])), rule: "match", ignore_eos: "", response_format: "text" };
const VIEWS = { completion: DEFAULTS, chat: { ...DEFAULTS, draft_count: "auto", max_tokens: "512" } };
const TEXTS = { completion: ["prompt"], chat: [...CALLS, "system", "message"] };
const SHARED = [
  ...["view", "draft_count", "rule", "drafter", "max_tokens", "seed", "stop_strings", "ignore_eos", "response_format", "schema"],
  ...NUMBERS, ...LISTS, ...Object.values(OF_RULES).flat(),
];
const FIELDS = [...SHARED, ...TEXTS.completion, ...TEXTS.chat];
// Fields that the gateway's errors call otherwise.
const NAMES = { stop: "stop_strings" };

export class Settings {
  // `viewed` is called when another view is to be shown.
  constructor(form, viewed) {
    this.form = form;
    this.viewed = viewed;
    this.shown = "";
    this.fresh = "";
    this.told = {};
    this.fields = Object.fromEntries(FIELDS.map((name) => [name, form.elements.namedItem(name)]));
    this.offered = [];
    const row = form.querySelector("#presets");
    for (const preset of PRESETS) row.append(this.button(preset));
    this.fill(DEFAULTS);
    this.read();
    form.addEventListener("change", () => this.follow());
    form.addEventListener("input", (event) => event.target.name in this.fields && this.check(event.target.name));
    for (const choice of this.fields.view) choice.addEventListener("change", () => this.show());
    window.addEventListener("hashchange", () => this.read());
  }

  get view() {
    return this.fields.view.value;
  }

  // The view of a fresh page, which is the gateway's to say, unless a link has said it.
  settle(view) {
    this.fresh ||= view;
    if (this.view === "") this.fill({ ...VIEWS[view], ...this.told, view });
  }

  show() {
    if (this.view === this.shown) return;
    this.shown = this.view;
    this.fields.prompt.required = this.view === "completion";
    this.follow();
    this.viewed(this.view);
  }

  button(preset) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = preset.name;
    button.addEventListener("click", () => this.fill(preset));
    return button;
  }

  // The drafters that the gateway reports. One that is chosen is always there: a link may come before any is reported,
  // and that one is gone is the gateway's to say.
  offer(names, chosen = this.fields.drafter.value) {
    const { drafter } = this.fields;
    this.offered = names.filter((name) => name !== drafter.options[0].text);
    options(drafter, 1, [...new Set([...this.offered, ...(chosen ? [chosen] : [])])].map((name) => [name, name]), chosen);
  }

  // What counts where the form says nothing, as the gateway reports it.
  recommend(defaults) {
    for (const name of RECOMMENDED) this.fields[name].placeholder = String(defaults?.[name] ?? "the model's");
  }

  fill(values) {
    this.offer(this.offered, values.drafter);
    for (const name of FIELDS) if (values[name] !== undefined && name !== "tool_choice") this.put(name, values[name]);
    // What can be chosen depends on the tools.
    this.follow(values.tool_choice);
    for (const name of FIELDS) this.check(name);
    this.show();
  }

  // A select takes no value that it does not offer; what a link got wrong stays visible as the first choice.
  put(name, value) {
    const field = this.fields[name];
    if (field.type === "checkbox") field.checked = value === "true";
    else field.value = value;
    if (field.tagName === "SELECT" && field.selectedIndex < 0) field.selectedIndex = 0;
  }

  value(name) {
    const field = this.fields[name];
    return field.type === "checkbox" ? (field.checked ? "true" : "") : field.value;
  }

  // Shows what belongs to what was chosen, and hides the rest.
  follow(choice = this.fields.tool_choice.value) {
    this.form.querySelector("#promise").textContent = PROMISES[this.value("rule")];
    for (const label of this.form.querySelectorAll("[data-rule]")) label.hidden = label.dataset.rule !== this.value("rule");
    for (const label of this.form.querySelectorAll("[data-format]")) label.hidden = label.dataset.format !== this.value("response_format");
    const named = (this.parsed("tools") ?? []).map(({ function: { name } }) => [NAMED + name, name]);
    options(this.fields.tool_choice, 3, named, choice);
    for (const name of Object.keys(PARSED)) this.check(name);
  }

  // Whether a field is part of a request as the form is now.
  counts(name) {
    if (CALLS.includes(name)) return this.view === "chat";
    return name !== "schema" || this.value("response_format") === "json_schema";
  }

  // What a field of PARSED says; undefined while it says nothing, or nothing that can be read.
  parsed(name) {
    try {
      return this.value(name).trim() === "" ? undefined : PARSED[name](this.value(name));
    } catch {
      return undefined;
    }
  }

  // Says beside a field what is wrong with its text, and takes back what was said before.
  check(name) {
    let wrong = "";
    try {
      if (!(name in PARSED) || !this.counts(name)) wrong = "";
      else if (this.value(name).trim() !== "") PARSED[name](this.value(name));
      else if (name === "schema") wrong = "A schema is wanted here.";
    } catch (error) {
      wrong = error.message;
    }
    if (name !== "view") this.blame(name, wrong);
    if (name in PARSED) this.fields[name].setCustomValidity(wrong);
  }

  // Whether a request can be made of the form. What is wrong comes into sight.
  valid() {
    for (const name of Object.keys(PARSED)) this.check(name);
    // The browser's own check, which the form leaves out, would come before this.
    for (const fold of this.form.querySelectorAll("details")) fold.open ||= fold.querySelector(":invalid") !== null;
    return this.form.reportValidity();
  }

  // Shows beside a field what the gateway said of it, by the gateway's name; whether there is such a field.
  refused(param, message) {
    const path = (param ?? "").split(" ")[0].split(".");
    const name = path[0] === "speculation" ? path[1] : path[0];
    const field = name === "response_format" && this.value(name) === "json_schema" ? "schema" : (NAMES[name] ?? name);
    if (!FIELDS.includes(field) || field === "view") return;
    this.blame(field, message);
    const fold = this.fields[field].closest("details");
    if (fold !== null) fold.open = true;
  }

  blame(name, message) {
    const field = this.fields[name];
    const id = `wrong-${name}`;
    const shown = document.getElementById(id);
    if (message === (shown?.textContent ?? "")) return;
    shown?.remove();
    const described = (field.getAttribute("aria-describedby") ?? "").split(" ").filter((each) => each !== "" && each !== id);
    if (message !== "") {
      const said = made("p", "wrong wide", message);
      said.id = id;
      (field.closest("label") ?? field).after(said);
      described.push(id);
    }
    if (message !== "") field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
    if (described.length > 0) field.setAttribute("aria-describedby", described.join(" "));
    else field.removeAttribute("aria-describedby");
  }

  read() {
    const told = new URLSearchParams(location.hash.slice(1));
    const named = FIELDS.filter((name) => told.has(name));
    if (named.length === 0) return;
    this.told = Object.fromEntries(named.filter((name) => name !== "view").map((name) => [name, told.get(name)]));
    const view = Object.hasOwn(VIEWS, told.get("view") ?? "") ? told.get("view") : this.fresh;
    this.fill({ ...VIEWS[view || "completion"], ...this.told, view });
  }

  // `message` stands for the one that is not written yet.
  link(message) {
    const values = Object.fromEntries(FIELDS.map((name) => [name, name === "view" ? this.view : this.value(name)]));
    values.message ||= message;
    const told = [...SHARED, ...TEXTS[this.view]].filter((name) => values[name] !== (name === "response_format" ? "text" : "")).map((name) => [name, values[name]]);
    return `${location.origin}${location.pathname}#${new URLSearchParams(told)}`;
  }

  // The body of /page/generate, all but what it is about. A seed goes as text, because a number of JavaScript has only 53 bits.
  request() {
    const value = (name) => this.value(name);
    const numbers = (names) => Object.fromEntries(names.filter((name) => value(name) !== "").map((name) => [name, Number(value(name))]));
    const parsed = (names) => Object.fromEntries(names.map((name) => [name, this.parsed(name)]).filter(([, said]) => said !== undefined));
    const [count, drafter, stops] = [value("draft_count"), value("drafter"), this.parsed("stop_strings") ?? []];
    return {
      max_tokens: Number(value("max_tokens")),
      ...numbers(NUMBERS),
      ...(value("seed") === "" ? {} : { seed: value("seed") }),
      ...(stops.length ? { stop: stops } : {}),
      ...parsed(LISTS),
      ...(value("ignore_eos") ? { ignore_eos: true } : {}),
      ...this.format(),
      ...(this.view === "chat" ? { ...parsed(["tools"]), ...this.choice() } : {}),
      speculation: {
        enabled: true, draft_count: count === "auto" ? "auto" : Number(count), rule: value("rule"), ...(drafter ? { drafter } : {}),
        ...numbers(OF_RULES[value("rule")] ?? []),
      },
    };
  }

  format() {
    const type = this.value("response_format");
    if (type === "text") return {};
    return { response_format: { type, ...(type === "json_schema" ? { json_schema: { name: "answer", schema: this.parsed("schema") } } : {}) } };
  }

  choice() {
    const chosen = this.value("tool_choice");
    if (chosen === "") return {};
    return { tool_choice: chosen.startsWith(NAMED) ? { type: "function", function: { name: chosen.slice(NAMED.length) } } : chosen };
  }
}

// Lets a select offer these after its first `kept` options, and nothing else.
function options(select, kept, wanted, chosen) {
  const own = [...select.options].slice(0, kept);
  if (String(wanted.map(([value]) => value)) !== String([...select.options].slice(kept).map((option) => option.value))) {
    select.replaceChildren(...own, ...wanted.map(([value, text]) => new Option(text, value)));
  }
  select.value = chosen;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
}
