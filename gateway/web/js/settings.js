// The form, which both views share: presets, what it asks for, and the link that fills it in. A link never runs anything.

// What repeats itself is what `lookup` finds again.
const REFRAIN = "Run, run, as fast as you can! You can't catch me, I'm the Gingerbread Man! ";
const LINES = "if door == 'open':\n    go_in()\nelse:\n    knock()\n\n";
const PRESETS = [
  {
    name: "Story",
    prompt: "Once upon a time there was a poor woodcutter, who lived with his wife and his three children near a great forest.",
    temperature: "0.7", draft_count: "4", max_tokens: "160",
  },
  {
    name: "Dialogue",
    prompt: "“Where are you going so early?” said the wolf. “To my grandmother,” answered the child. “And what",
    temperature: "0.8", draft_count: "4", max_tokens: "160",
  },
  {
    name: "List",
    prompt: "The first brother had a sword, the second brother had a horn, and the third brother had a cap. The first brother",
    temperature: "0", draft_count: "6", max_tokens: "160",
  },
  {
    name: "Repetition",
    prompt: `${REFRAIN.repeat(4)}Run, run,`,
    temperature: "0", draft_count: "8", max_tokens: "128",
  },
  {
    name: "Surprise",
    prompt: "The queen opened the little box, and inside it lay",
    temperature: "1.3", draft_count: "4", max_tokens: "160",
  },
  {
    name: "Code",
    prompt: `${LINES.repeat(6)}if`,
    temperature: "0", draft_count: "8", max_tokens: "128",
  },
];
const PROMISES = {
  match: "match: the very tokens of plain decoding with the same seed.",
  ratio: "ratio: the target's own distribution; the tokens depend on the draft too.",
  block: "block: the target's own distribution, and more guesses kept; the tokens depend on the draft too.",
  lenient: "lenient: keeps more guesses, and does not follow the target's distribution.",
  typical: "typical: keeps what the target finds likely enough, and does not follow its distribution.",
};
// Left empty, what is the model's to say. The field shows it, and the request says nothing.
const RECOMMENDED = ["temperature", "top_p"];
// What a link does not name is as on a fresh page.
const DEFAULTS = { ...PRESETS[0], temperature: "", rule: "match", drafter: "", top_p: "", seed: "", stop_strings: "", system: "", message: "" };
const VIEWS = { completion: DEFAULTS, chat: { ...DEFAULTS, draft_count: "auto", max_tokens: "512" } };
const TEXTS = { completion: ["prompt"], chat: ["system", "message"] };
const SHARED = ["view", "draft_count", "rule", "drafter", "temperature", "top_p", "max_tokens", "seed", "stop_strings"];
const FIELDS = [...SHARED, ...TEXTS.completion, ...TEXTS.chat];

export class Settings {
  // `viewed` is called when another view is to be shown.
  constructor(form, viewed) {
    this.form = form;
    this.viewed = viewed;
    this.shown = "";
    this.fields = Object.fromEntries(FIELDS.map((name) => [name, form.elements.namedItem(name)]));
    this.offered = [];
    const row = form.querySelector("#presets");
    for (const preset of PRESETS) row.append(this.button(preset));
    this.fill(DEFAULTS);
    this.read();
    form.addEventListener("change", () => this.promise());
    for (const choice of this.fields.view) choice.addEventListener("change", () => this.show());
    window.addEventListener("hashchange", () => this.read());
  }

  get view() {
    return this.fields.view.value;
  }

  // The view of a fresh page, which is the gateway's to say, unless a link has said it.
  settle(view) {
    if (this.view === "") this.fill({ ...VIEWS[view], view });
  }

  show() {
    if (this.view === this.shown) return;
    this.shown = this.view;
    this.fields.prompt.required = this.view === "completion";
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
    const wanted = ["", ...new Set([...this.offered, ...(chosen ? [chosen] : [])])];
    if (String(wanted) !== String([...drafter.options].map((option) => option.value))) {
      drafter.replaceChildren(drafter.options[0], ...wanted.slice(1).map((name) => new Option(name, name)));
    }
    drafter.value = chosen;
  }

  // What counts where the form says nothing, as the gateway reports it.
  recommend(defaults) {
    for (const name of RECOMMENDED) this.fields[name].placeholder = String(defaults?.[name] ?? "the model's");
  }

  fill(values) {
    this.offer(this.offered, values.drafter);
    for (const name of FIELDS) if (values[name] !== undefined) this.fields[name].value = values[name];
    // A select takes no value that it does not offer; what a link got wrong stays visible as the first choice.
    for (const select of [this.fields.draft_count, this.fields.rule]) if (select.selectedIndex < 0) select.selectedIndex = 0;
    this.promise();
    this.show();
  }

  promise() {
    this.form.querySelector("#promise").textContent = PROMISES[this.fields.rule.value];
  }

  read() {
    const told = new URLSearchParams(location.hash.slice(1));
    const named = FIELDS.filter((name) => told.has(name));
    if (named.length === 0) return;
    const view = told.get("view") === "chat" ? "chat" : "completion";
    this.fill({ ...VIEWS[view], ...Object.fromEntries(named.map((name) => [name, told.get(name)])), view });
  }

  // `message` stands for the one that is not written yet.
  link(message) {
    const values = { ...Object.fromEntries(FIELDS.map((name) => [name, this.fields[name].value])) };
    values.message ||= message;
    const told = [...SHARED, ...TEXTS[this.view]].filter((name) => values[name] !== "").map((name) => [name, values[name]]);
    return `${location.origin}${location.pathname}#${new URLSearchParams(told)}`;
  }

  // The body of /page/generate, all but what it is about. A seed goes as text, because a number of JavaScript has only 53 bits.
  request() {
    const value = (name) => this.fields[name].value;
    const stops = value("stop_strings").split("\n").filter((stop) => stop !== "");
    const count = value("draft_count");
    const drafter = value("drafter");
    return {
      max_tokens: Number(value("max_tokens")),
      ...Object.fromEntries(RECOMMENDED.filter((name) => value(name) !== "").map((name) => [name, Number(value(name))])),
      ...(value("seed") === "" ? {} : { seed: value("seed") }),
      ...(stops.length ? { stop: stops.map((stop) => stop.replaceAll("\\n", "\n")) } : {}),
      speculation: {
        enabled: true, draft_count: count === "auto" ? "auto" : Number(count), rule: value("rule"), ...(drafter ? { drafter } : {}),
      },
    };
  }
}
