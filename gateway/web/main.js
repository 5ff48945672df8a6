// Wires the page together: buttons and keys, one run or a race at a time, and one change of the page a frame.

import { drawCounts, drawPositions, drawTimes } from "./charts.js";
import { flash, openCopyDialog, save, toClipboard } from "./copying.js";
import { events } from "./events.js";
import { Tip } from "./facts.js";
import { drawFigures, drawLegend, result, summary } from "./figures.js";
import { Painter, Seen } from "./painter.js";
import { clock, lanes, verdict } from "./race.js";
import { RoundsView } from "./rounds.js";
import { Run } from "./run.js";
import { Settings } from "./settings.js";
import { Status } from "./status.js";
import { Stream } from "./stream.js";

const FIGURES_MS = 100;
const at = (id) => document.getElementById(id);

class Page {
  constructor() {
    this.settings = new Settings(at("ask"));
    this.status = new Status(at("services"), at("banner"), (now) => this.settings.offer(now.gateway.drafters));
    this.rounds = new RoundsView(at("rounds"), at("rounds-note"), at("trees"));
    const tip = new Tip(at("tip"));
    this.lanes = ["lane-main", "lane-plain"].map((id) => ({
      box: at(id),
      clock: at(id).querySelector(".clock"),
      stream: new Stream(at(id).querySelector(".stream"), tip, at("facts")),
      run: null,
    }));
    this.stopping = null;
    this.figuresAt = 0;
    this.chartsSeen = new Seen(at("counts"));
    this.painter = new Painter(() => this.draw());
    this.listen(tip);
  }

  get busy() {
    return this.stopping !== null;
  }

  listen(tip) {
    const click = (id, act) => at(id).addEventListener("click", (event) => event.currentTarget.ariaDisabled === "true" || act());
    at("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.generate();
    });
    click("race", () => this.race());
    click("stop", () => this.stop());
    click("copy-as", () => at("ask").reportValidity() && openCopyDialog(() => this.settings.request(), () => this.status.now));
    click("copy-link", () => this.copyLink());
    click("copy-text", () => this.say("copy-text", toClipboard(this.lanes[0].run.text), "Mark the answer instead."));
    click("download", () => this.download());
    at("show-marks").addEventListener("change", (event) => at("answer").classList.toggle("unmarked", !event.target.checked));
    at("show-rejected").addEventListener("change", (event) => at("answer").classList.toggle("with-rejected", event.target.checked));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.generate();
      if (event.key === "Escape" && !at("copy-dialog").open) this.stop();
      if (event.key === "Escape") tip.hide();
    });
  }

  async generate() {
    if (this.busy || !at("ask").reportValidity()) return;
    const request = this.settings.request();
    request.speculation.return_rounds = true;
    this.begin([{ ...request, probabilities: true }]);
    await this.follow(this.lanes[0]);
    this.end(summary(this.lanes[0].run));
  }

  // One behind the other: together they would share the machine, and neither clock would mean anything.
  async race() {
    if (this.busy || !at("ask").reportValidity()) return;
    const requests = lanes(this.settings.request());
    this.begin(requests);
    const [fast, plain] = this.lanes;
    await this.follow(fast);
    if (fast.run.completion !== null && !this.stopping.signal.aborted) {
      plain.run.request.seed = fast.run.completion.seed;
      await this.follow(plain);
    }
    this.end(this.judge(fast.run, plain.run));
  }

  begin(requests) {
    this.stopping = new AbortController();
    at("answer").classList.toggle("racing", requests.length > 1);
    for (const [index, lane] of this.lanes.entries()) {
      lane.run = requests[index] ? new Run(requests[index]) : null;
      lane.startedMs = null;
      lane.box.hidden = lane.run === null;
      lane.clock.textContent = "waiting";
      lane.stream.clear(lane.run, lane.run?.request.prompt ?? "");
    }
    this.rounds.clear(this.lanes[0].run);
    for (const id of ["failure", "verdict", "facts", "result"]) at(id).hidden = true;
    this.enable();
    this.showAnswer();
    at("announce").textContent = requests.length > 1 ? "The race has begun." : "Generating.";
    this.painter.ask();
  }

  // In one column the answer would come out of sight.
  showAnswer() {
    if (at("lanes").getBoundingClientRect().top > 0.8 * innerHeight) at("figures").scrollIntoView();
  }

  async follow(lane) {
    const { run } = lane;
    lane.startedMs = performance.now();
    this.painter.ask();
    try {
      for await (const event of events(run.request, this.stopping.signal)) {
        run.take(event, performance.now() - lane.startedMs);
        if (run.rounds.at(-1)?.fallback_reason && !lane.told) this.status.ask();
        lane.told = Boolean(run.rounds.at(-1)?.fallback_reason);
        this.painter.ask();
      }
    } catch (error) {
      if (this.stopping.signal.aborted) run.stopped = true;
      else run.error = { reason: error.reason ?? "", message: error.message };
    }
  }

  end(told) {
    const broken = this.lanes.find((lane) => lane.run?.error);
    this.stopping = null;
    this.enable();
    this.draw();
    at("failure").hidden = !broken;
    at("failure").textContent = broken ? broken.run.error.message : "";
    at("result").textContent = result(this.lanes[0].run);
    at("result").hidden = at("result").textContent === "";
    at("announce").textContent = told;
  }

  judge(fast, plain) {
    const { same, head, lines } = verdict(fast, plain);
    const title = document.createElement("strong");
    title.textContent = head;
    at("verdict").className = `verdict ${same ? "same" : "other"}`;
    at("verdict").replaceChildren(title, `\n${lines.join("\n")}`);
    at("verdict").hidden = false;
    return `${head}. ${lines.join(" ")}`;
  }

  stop() {
    this.stopping?.abort();
  }

  enable() {
    for (const id of ["generate", "race"]) at(id).ariaDisabled = String(this.busy);
    at("stop").ariaDisabled = String(!this.busy);
    for (const id of ["download", "copy-text"]) at(id).ariaDisabled = String(this.busy || this.lanes[0].run === null);
  }

  draw() {
    const running = this.lanes.filter((lane) => lane.run !== null && lane.startedMs !== null);
    for (const lane of running) {
      lane.stream.draw();
      const elapsedMs = lane.run.ended ? lane.run.lastUs / 1e3 : performance.now() - lane.startedMs;
      if (at("answer").classList.contains("racing")) lane.clock.textContent = clock(lane.run, elapsedMs);
    }
    this.rounds.draw(!this.busy);
    if (!this.busy || performance.now() - this.figuresAt >= FIGURES_MS) this.drawFigures();
    if (this.busy) this.painter.ask();
  }

  drawFigures() {
    this.figuresAt = performance.now();
    const { run } = this.lanes[0];
    drawLegend(at("legend"), run);
    drawFigures(at("figures"), run);
    if (this.busy && !this.chartsSeen.now) return;
    drawPositions(at("positions"), run);
    drawTimes(at("times-bar"), at("times"), run);
    drawCounts(at("counts"), at("counts-range"), run);
  }

  copyLink() {
    const link = this.settings.link();
    history.replaceState(null, "", link);
    this.say("copy-link", toClipboard(link), "The address bar has the link.");
  }

  download() {
    const runs = this.lanes.filter((lane) => lane.run !== null).map(({ run }) => ({ request: run.request, stopped: run.stopped, events: run.events }));
    save("outrider-trace.json", { format: "outrider-trace-1", saved: new Date().toISOString(), status: this.status.now, runs });
  }

  async say(id, done, instead) {
    const copied = await done;
    flash(at(id), copied ? "Copied" : "Not copied");
    at("announce").textContent = copied ? "Copied." : `The browser did not let the page copy. ${instead}`;
  }
}

new Page();
