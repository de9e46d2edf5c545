// What every page uses: elements, numbers, texts of a model, theme, keys, charts (uPlot), packed data.

const get = id => document.getElementById(id);

/** Return an element; attributes that are functions are listeners, children that are texts stay texts. */
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (name === "style") node.style.cssText += value || "";
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined));
  return node;
}

/** Return a number with four digits, "–" for none. */
function digits(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-4)) return value.toExponential(2);
  return String(+value.toPrecision(4));
}

/**
 * Return a function that writes numbers of a row with as many decimals as give half of its interval two
 * digits, as the command does; with four digits where there is no interval.
 */
function writerOf({ low, high }) {
  const half = low === null || low === undefined ? NaN : (high - low) / 2;
  const places = half > 0 && half < Infinity ? Math.max(0, 1 - Math.floor(Math.log10(half))) : 7;
  return value => typeof value !== "number" || places > 6 ? digits(value) : (+value.toFixed(places) + 0).toFixed(places);
}

const signed = text => /^[1-9]|^0\.\d*[1-9]/.test(text) ? `+${text}` : text;

/** Return the 95 % interval of a row. */
function intervalOf(row) {
  const write = writerOf(row);
  const end = value => value < 0 ? `-${write(-value)}` : signed(write(value)); // -0.00 is below 0
  return row.low === null ? "–" : `[${end(row.low)}, ${end(row.high)}]`;
}

/** Return seconds as a person says them. */
function duration(seconds) {
  if (seconds < 100) return `${digits(+seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const MOST_SHOWN = 20000;

/** Return nodes for a text of a model: characters that hide or turn text around are named instead. */
function shown(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(HIDDEN)) {
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    parts.push(text.slice(at, found.index), make("span", { class: "control" }, `⟨U+${code}⟩`));
    at = found.index + 1;
  }
  return [...parts, text.slice(at)];
}

/** Return a text of a model as a block; of a long one the start, and a button for the rest. */
function block(text, label) {
  const box = make("pre", { class: "text", dir: "auto", tabindex: 0, role: "group", "aria-label": label });
  const start = text.slice(0, MOST_SHOWN);
  box.append(...shown(start));
  if (text.length > start.length) {
    const more = make("button", { type: "button", click: () => box.replaceChildren(...shown(text)) },
      `show all ${text.length.toLocaleString()} characters`);
    box.append(more);
  }
  return box;
}

/** Return a name that may be broken after its signs. */
const breakable = name => make("span", {}, name.split(/(?<=[=_./-])/).flatMap(part => [part, make("wbr")]));

/** Return a table: heads, then rows of cells (texts, numbers or nodes); the first column heads its row. */
function table(caption, heads, rows) {
  const cell = value => (value instanceof Node ? value : digits(value));
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": caption },
    make("table", {}, make("caption", {}, make("span", {}, caption)),
      make("thead", {}, make("tr", {}, heads.map(head => make("th", { scope: "col" }, head)))),
      make("tbody", {}, rows.map(([first, ...rest]) => make("tr", {},
        make("th", { scope: "row" }, typeof first === "string" ? breakable(first) : cell(first)), rest.map(value => make("td", {}, cell(value))))))));
}

/** Return the section with its heading, made on the first call and named in the navigation. */
function section(id, title) {
  if (!get(id)) {
    if (!get("nav").firstChild) get("nav").append(make("ul"));
    get("nav").firstChild.append(make("li", {}, make("a", { href: `#${id}` }, title)));
    get("main").append(make("section", { id, "aria-labelledby": `${id}-title` },
      make("h2", { id: `${id}-title` }, title), make("div", { id: `${id}-body` })));
  }
  return get(`${id}-body`);
}

/** Put children into a node if what they show has changed since the last call, so that a reader keeps place. */
function refresh(node, value, build) {
  const now = JSON.stringify(value);
  if (node.dataset.value === String(now.length) && node.shows === now) return;
  node.dataset.value = now.length;
  node.shows = now;
  node.replaceChildren(...[build()].flat());
}

/** Return what base64 of deflated JSON holds. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

/** Bring what a choice opened into sight where a narrow window has it below the list. */
function below(node) {
  if (matchMedia("(max-width: 820px)").matches && node.getBoundingClientRect().top > innerHeight / 2) node.scrollIntoView();
}

// ---- theme ----------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const remembered = { // a page opened from a file may have no storage
  get(key) { try { return localStorage.getItem(key) || ""; } catch { return ""; } },
  set(key, value) { try { localStorage.setItem(key, value); } catch { /* the choice lasts as long as the page */ } },
};
function dress() {
  document.documentElement.dataset.theme = get("theme").value || (dark.matches ? "dark" : "light");
  for (const chart of charts) chart.draw();
}
const charts = new Set();
get("theme").value = remembered.get("theme");
get("theme").addEventListener("change", () => { remembered.set("theme", get("theme").value); dress(); });
dark.addEventListener("change", dress);
dress();

// ---- keys -----------------------------------------------------------------------------------------------

const bindings = new Map();

/** Let ``action`` follow a key; the help lists it. */
function bind(key, meaning, action) {
  bindings.set(key, action);
  get("keys").append(make("dt", {}, make("kbd", {}, key)), make("dd", {}, meaning));
}
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || get("help").open) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") { event.preventDefault(); event.target.blur(); } // a search field would be emptied
    return;
  }
  const action = bindings.get(event.key);
  if (action) { event.preventDefault(); action(); }
});
bind("?", "this list", () => get("help").showModal());
get("help-button").addEventListener("click", () => get("help").showModal());
bind("t", "light or dark", () => {
  get("theme").value = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  get("theme").dispatchEvent(new Event("change"));
});

// ---- charts ---------------------------------------------------------------------------------------------

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colours = [];

/** Reserve a colour for a name (a task, a run): the same on all charts of a page. */
function reserve(name) {
  if (!colours.includes(name)) colours.push(name);
}
/** Return the number of a name's colour: the reserved one, else its place in its own chart; of a lone line none's. */
function tone(name, among = []) {
  if (among.length === 1 && !colours.includes(name)) return 9;
  return Math.max(0, colours.includes(name) ? colours.indexOf(name) : among.indexOf(name));
}
const dot = number => make("span", { class: "dot", "--own": `var(--c${number % 10})` });
const dashes = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

/** Return values smoothed by an exponential mean; ``weight`` 0 leaves them. */
function smooth(values, weight) {
  if (!weight) return values;
  let mean = null;
  return values.map(value => value === null ? null : (mean = mean === null ? value : weight * mean + (1 - weight) * value));
}

const view = { hidden: new Set(), smoothing: 0, events: [], steps: null };
/* names switched off on all charts; weight of the mean; of charts over steps: [{step, text, source, alarm}] marked
   on them, and [first, last] step shown unless a reader zooms (null: those of each chart) */

/**
 * A chart: ``{id, title, x: [..], lines: [{name, y, low, high, dashed}], note, over, bars, chips}``.
 * ``over`` names the horizontal axis (default "step", where events are marked); ``bars`` draws a histogram;
 * ``chips`` adds a switch per line, where the page has no common one.
 */
class Chart {
  constructor(parent, spec) {
    this.spec = spec;
    this.note = make("figcaption", {}, spec.note || "");
    this.plotted = make("div", { class: "plot", tabindex: 0, role: "img" });
    this.tip = make("div", { class: "tip", role: "status", hidden: true });
    this.numbers = make("div", { hidden: true });
    this.chips = make("div", { class: "chips" });
    const open = make("button", { type: "button", class: "quiet", "aria-expanded": "false", click: () => {
      this.numbers.hidden = !this.numbers.hidden;
      open.setAttribute("aria-expanded", String(!this.numbers.hidden));
      this.list();
    } }, "numbers");
    this.node = make("figure", { id: `chart-${spec.id}` },
      make("div", { class: "head" }, make("h3", {}, spec.title), open), this.plotted, this.chips, this.note, this.numbers, this.tip);
    parent.append(this.node);
    this.plotted.addEventListener("keydown", event => this.step(event));
    this.plotted.addEventListener("blur", () => { this.tip.hidden = true; });
    charts.add(this);
    this.switches();
    // drawn when it comes into sight: a page of a hundred charts opens as fast as one of ten
    this.seen = false;
    new IntersectionObserver((entries, watch) => {
      if (!entries.some(entry => entry.isIntersecting)) return;
      watch.disconnect();
      this.seen = true;
      this.draw();
      new ResizeObserver(() => this.fit()).observe(this.plotted);
    }, { rootMargin: "300px" }).observe(this.node);
  }

  /** Show other numbers. */
  update(spec) {
    const now = JSON.stringify([spec.x, spec.lines, spec.note, view.steps, view.events.length]);
    const same = now === this.shows;
    this.shows = now;
    this.spec = spec;
    this.note.replaceChildren(spec.note || "");
    if (!same) { this.switches(); this.draw(); this.list(); }
  }

  get names() { return this.spec.lines.map(line => line.name); }

  get lines() { return this.spec.lines.filter(line => !view.hidden.has(line.name)); }

  list() {
    if (this.numbers.hidden) return;
    const { x, lines, title, over = "step" } = this.spec;
    const every = Math.max(1, Math.ceil(x.length / 40));
    const rows = x.map((at, i) => [at, ...lines.map(line => line.y[i])]).filter((_, i) => i % every === 0 || i === x.length - 1);
    this.numbers.replaceChildren(table(title, [over, ...lines.map(line => line.name)], rows));
  }

  fit() {
    const width = Math.floor(this.plotted.clientWidth);
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: 190 });
  }

  draw() {
    if (!this.seen) return;
    const { x, bars, title, over = "step" } = this.spec, lines = this.lines;
    this.drawn = lines;
    const labels = this.spec.lines.map(line => `${line.name} ${digits(line.y.findLast(value => value !== null))}`);
    this.plotted.setAttribute("aria-label", `${title} over ${over}; last: ${labels.join(", ")}. Arrow keys read values.`);
    const series = [{}], data = [x], bands = [];
    for (const line of lines) {
      const number = tone(line.name, this.names), stroke = css(`--c${number % 10}`);
      data.push(bars ? line.y : smooth(line.y, view.smoothing));
      series.push({
        stroke, width: 1.6, dash: line.dashed ? [5, 4] : dashes[Math.floor(number / 10) % dashes.length], spanGaps: true,
        points: { show: !bars && x.length < 30, size: 5, stroke, fill: stroke },
        ...(bars ? { paths: uPlot.paths.stepped({ align: 1 }), fill: stroke + "22" } : {}),
      });
      if (line.low && !view.smoothing) {
        data.push(line.high, line.low);
        const none = { width: 0, stroke: "transparent", points: { show: false }, spanGaps: true };
        series.push(none, none);
        bands.push({ series: [series.length - 2, series.length - 1], fill: stroke + "22" });
      }
    }
    const { min, max } = this.plot?.scales.x ?? {};
    const zoom = Number.isFinite(min) && (min !== this.whole[0] || max !== this.whole[1]) ? { min, max } : null;
    this.plot?.destroy();
    const axis = { stroke: css("--muted"), font: "11px system-ui", grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
    this.plot = new uPlot({
      width: Math.floor(this.plotted.clientWidth) || 380, height: 190, padding: [8, 10, 0, 0],
      legend: { show: false }, series, bands,
      cursor: { y: false, drag: { x: true, y: false }, points: { size: 6 }, ...(over === "step" ? { sync: { key: "step" } } : {}) },
      scales: { x: { time: false, range: (_, first, last) => this.steps(first, last) }, y: { range: (_, low, high) => this.range(low, high) } },
      axes: [{ ...axis, size: 24, gap: 4, values: (_, ticks) => ticks.map(digits) }, { ...axis, size: (_, values) => Math.max(46, 6.5 * Math.max(0, ...(values || []).map(text => text.length)) + 12), gap: 4, values: (_, ticks) => ticks.map(digits) }],
      hooks: { draw: [plot => this.mark(plot)], setCursor: [plot => this.tell(plot)] },
    }, data, this.plotted);
    this.whole = this.steps(x[0], x.at(-1));
    if (zoom) this.plot.setScale("x", zoom);
    this.plot.over.addEventListener("mouseleave", () => { this.tip.hidden = true; });
  }

  steps(first, last) {
    const { x, over = "step" } = this.spec, isWhole = first === x[0] && last === x.at(-1);
    if (over === "step" && view.steps && isWhole) return view.steps;
    return first === last ? [first - 1, last + 1] : [first, last];
  }

  range(low, high) {
    if (low === null) return [0, 1];
    const least = Math.max(1e-6, 0.02 * Math.max(Math.abs(low), Math.abs(high)));
    if (high - low < least) return low === 0 ? [-0.03, 1] : [(low + high) / 2 - least, (low + high) / 2 + least];
    return [low >= 0 && low < 0.4 * high ? 0 : low - 0.05 * (high - low), high + 0.05 * (high - low)];
  }

  switches() {
    if (this.spec.chips) refresh(this.chips, this.names, () => this.names.map(name => chip(name, this.names)));
  }

  /** Draw the events: alarms as dashed lines, decisions as ticks at the lower edge. */
  mark(plot) {
    if ((this.spec.over || "step") !== "step") return;
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const event of view.events) {
      const at = Math.round(plot.valToPos(event.step, "x", true));
      ctx.strokeStyle = css(event.alarm ? "--bad" : event.source === "guard" ? "--good" : "--accent");
      ctx.globalAlpha = event.alarm ? 0.7 : 0.9;
      ctx.lineWidth = devicePixelRatio * (event.alarm ? 1 : 2);
      ctx.setLineDash(event.alarm ? [4 * devicePixelRatio, 3 * devicePixelRatio] : []);
      ctx.beginPath();
      ctx.moveTo(at, event.alarm ? bbox.top : bbox.top + bbox.height - 7 * devicePixelRatio);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  /** Show the values at the cursor, and what was decided there. */
  tell(plot) {
    const { idx, left } = plot.cursor;
    const own = plot.over.matches(":hover") || document.activeElement === this.plotted;
    this.tip.hidden = !own || idx === null || idx === undefined || left < 0;
    if (this.tip.hidden) return;
    const at = this.spec.x[idx], over = this.spec.over || "step";
    const rows = this.drawn.map(line => ({ line, value: line.y[idx], i: idx })).filter(row => row.value !== null && row.value !== undefined)
      .sort((a, b) => b.value - a.value);
    const interval = ({ line, i }) => line.low && line.low[i] !== null ? ` [${digits(line.low[i])}, ${digits(line.high[i])}]` : "";
    const near = Math.abs(plot.posToVal(left + 5, "x") - plot.posToVal(left, "x"));
    const events = over === "step" ? view.events.filter(event => Math.abs(event.step - at) <= near) : [];
    this.tip.replaceChildren(make("strong", {}, `${over} ${digits(at)}`),
      ...rows.slice(0, 12).map(row => make("div", {}, dot(tone(row.line.name, this.names)),
        row.line.name, make("b", {}, digits(row.value) + interval(row)))),
      ...events.slice(0, 3).map(event => make("p", { class: event.alarm ? "bad" : "" }, event.text)),
      events.length > 3 ? make("p", {}, `and ${events.length - 3} more decisions`) : "");
    const inside = this.plotted.offsetLeft + plot.over.offsetLeft + left;
    const room = this.node.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(4, Math.min(inside + 14, inside + 14 > room ? inside - this.tip.offsetWidth - 14 : room))}px`;
    this.tip.style.top = `${this.plotted.offsetTop + 12}px`;
  }

  /** Move the cursor by keys. */
  step(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (!move || !this.plot) return;
    event.preventDefault();
    const last = this.spec.x.length - 1;
    const now = this.plot.cursor.idx ?? (move < 0 ? last + 1 : -1);
    const next = Math.max(0, Math.min(last, now + move));
    this.plot.setCursor({ left: this.plot.valToPos(this.spec.x[next], "x"), top: 10 });
  }
}

/** Return a switch of a name on all charts; ``among``: the names of the one chart that it belongs to. */
function chip(name, among = []) {
  const node = make("button", { type: "button", class: "chip", "aria-pressed": String(!view.hidden.has(name)), click: () => {
    if (!view.hidden.delete(name)) view.hidden.add(name);
    for (const other of document.querySelectorAll(".chip")) {
      if (other.value === name) other.setAttribute("aria-pressed", String(!view.hidden.has(name)));
    }
    for (const chart of charts) chart.draw();
  } }, dot(tone(name, among)), name);
  node.value = name;
  return node;
}

/** Show the charts in a node: those of former calls get their new numbers. */
function showCharts(parent, specs) {
  if (!parent.drawn) parent.drawn = new Map();
  for (const spec of specs) {
    if (parent.drawn.has(spec.id)) parent.drawn.get(spec.id).update(spec);
    else parent.drawn.set(spec.id, new Chart(parent, spec));
  }
}

/** Show charts with a common smoothing and a switch per name; ``hint`` says what their marks mean. */
function showSection(body, id, specs, names, hint) {
  if (!body.charts) {
    const smoothing = make("select", { id: `smooth-${id}`, "aria-label": "Smoothing", change: () => {
      view.smoothing = Number(smoothing.value);
      for (const other of document.querySelectorAll("select[id^=smooth-]")) other.value = smoothing.value;
      for (const chart of charts) chart.draw();
    } }, [["0", "off"], ["0.6", "light"], ["0.9", "strong"]].map(([value, text]) => make("option", { value }, text)));
    smoothing.value = String(view.smoothing);
    body.names = make("div", { class: "chips", role: "group", "aria-label": "Lines shown" });
    body.charts = make("div", { class: "charts" });
    body.append(make("div", { class: "chips" }, make("label", { class: "small muted", for: `smooth-${id}` }, "smoothing"), smoothing,
      make("span", { class: "small muted" }, `${hint}${hint ? " · " : ""}drag to zoom, double-click to zoom out`)), body.names, body.charts);
  }
  refresh(body.names, names, () => names.length > 1 ? names.map(name => chip(name)) : []);
  showCharts(body.charts, specs);
}

// ---- a page, and one that goes on while the run does ------------------------------------------------------

/** Show the data in the page or, served by ``watch``, what the server has, again and again. */
async function start(show) {
  const embedded = JSON.parse(get("data").textContent);
  if (embedded) { show(embedded); return; }
  const live = get("live");
  live.hidden = false;
  let known = "", wait = 2;
  for (;;) {
    try {
      const answer = await fetch("data.json", { headers: known ? { "If-None-Match": known } : {}, cache: "no-store" });
      if (answer.status === 200) {
        show(await answer.json());
        known = answer.headers.get("ETag");
      } else if (answer.status !== 304) throw new Error(await answer.text());
      wait = Math.max(2, Number(answer.headers.get("X-Next-Seconds")) || 2);
      live.className = "";
      live.textContent = `live, ${new Date().toLocaleTimeString()}`;
    } catch (error) {
      live.className = "lost";
      live.textContent = error instanceof TypeError ? "the server is gone" : String(error.message || error);
    }
    await new Promise(done => setTimeout(done, 1000 * wait));
    while (document.hidden) await new Promise(done => document.addEventListener("visibilitychange", done, { once: true }));
  }
}
