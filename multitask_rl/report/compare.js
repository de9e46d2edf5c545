// The page of compared runs: arms, differences, curves, tasks against each other, costs, prompts, settings.

const verdicts = { better: "good", worse: "bad" };
const named = (arm, among) => make("span", { class: "name" }, dot(tone(arm, among)), breakable(arm));
const ends = row => row.low === null ? "–" : `[${digits(row.low)}, ${digits(row.high)}]`;
const amount = value => value === null || value === undefined ? "–" : value >= 1000 ? Math.round(value).toLocaleString("en") : digits(+value.toPrecision(3));
const inUnit = (value, unit) => unit === "seconds" && typeof value === "number" ? duration(value) : amount(value);
const setting = value => make("span", {}, ...shown(value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value)));

function showCompare(data) {
  get("title").textContent = document.title = data.name;
  get("subtitle").textContent = data.subtitle;
  data.arms.forEach(arm => reserve(arm.name));
  showArms(section("arms", "Arms"), data);
  showDifferences(section("differences", "Differences"), data);
  showCurves(section("held-out", "Held out"), data);
  if (data.rewards.length) showSection(section("training", "Training"), "training", data.rewards, data.arms.map(arm => arm.name), "bands: lowest and highest of the runs of an arm");
  performance.mark("curves");
  if (data.tasks.length > 1 && data.arms.length > 1) showTasks(section("tasks", "Task against task"), data);
  showCosts(section("costs", "Costs"), data);
  prompts.build(section("prompts", "Prompts"), data);
  showSettings(section("settings", "Settings"), data);
}

/** Return a table whose heads sort it; ``rows`` hold [shown, value to sort by]. */
function sorted(caption, heads, rows) {
  const box = make("div");
  let by = -1, turn = 1;
  const value = cell => Array.isArray(cell) ? cell[1] : cell;
  const order = (a, b) => {
    const [one, other] = [value(a[by]), value(b[by])];
    if (one === null || other === null) return (one === null) - (other === null);
    return turn * (typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other)));
  };
  const draw = () => {
    const own = by < 0 ? rows : [...rows].sort(order);
    const buttons = heads.map((head, i) => make("button", { type: "button", class: "quiet", "aria-label": `sort by ${head}`, click: () => {
      turn = by === i ? -turn : 1;
      by = i;
      draw();
      box.querySelectorAll("thead button")[i].focus();
    } }, head, by === i ? (turn > 0 ? " ↑" : " ↓") : ""));
    box.replaceChildren(table(caption, buttons, own.map(row => row.map(cell => Array.isArray(cell) ? cell[0] : cell))));
  };
  draw();
  return box;
}

function showArms(body, data) {
  const { arms, result } = data;
  const keys = Object.keys(result.keys).slice(0, 6);
  const mark = { better: " ▲", worse: " ▼" };
  const rows = arms.map((arm, i) => [
    [named(arm.name), arm.name],
    ...keys.map(key => [setting(result.keys[key][i]), result.keys[key][i]]),
    [make("span", { title: arm.runs.join("\n") }, arm.runs.length > 1 ? `${arm.runs.length} (seeds ${arm.seeds.join(", ")})` : "1"), arm.runs.length],
    ...data.tasks.map(task => {
      const own = arm.tasks[task], row = i ? result.comparisons[i - 1].tasks[task] : null;
      if (!own) return ["–", null];
      return [make("span", { class: (row && verdicts[row.verdict]) || "", title: ends(own) }, digits(own.mean) + ((row && mark[row.verdict]) || "")), own.mean];
    }),
  ]);
  body.append(
    make("dl", { class: "tiles" }, data.tiles.map(([name, value, more]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, digits(value), more ? make("small", {}, more) : null)))),
    data.notes.length ? make("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": "To know" }, make("ul", { class: "plain" }, data.notes.map(note => make("li", { class: "warn" }, ...shown(note))))) : "",
    make("p"),
    sorted("Last evaluation of each arm, mean over its runs; a head sorts. Pointer on a number: its 95 % interval", ["arm", ...keys.map(key => shortened(key, Object.keys(result.keys))), "runs", ...data.tasks], rows),
    arms.length > 1 ? make("p", { class: "small muted" }, `▲ better, ▼ worse than ${arms[0].name}: at 5 % over all ${result.num_verdicts} verdicts of this page together (Holm)`)
      : make("p", {}, `One arm: these runs differ in the seed alone (${arms[0].seeds.join(", ")}), so there is nothing to compare it with. --each-run compares the runs.`));
  const trained = Object.keys(result.effects);
  const cell = row => row ? make("span", { class: verdicts[row.verdict] || "muted", title: row.verdict }, `${signed(writerOf(row)(row.delta))} ${intervalOf(row)}`) : "–";
  if (trained.length) body.append(make("p"), table("Training on one task (row) changed a held-out result (column) from first to last evaluation; coloured: better or worse at 5 % over the whole matrix (Holm)",
    ["training on", ...data.tasks], trained.map(name => [name, ...data.tasks.map(task => cell(result.effects[name][task]))])));
}

/** Return the last words of a key that no other of ``keys`` ends with. */
function shortened(key, keys) {
  const words = key.split(".");
  const isOthers = ending => keys.some(other => other !== key && `.${other}`.endsWith(`.${ending}`));
  let start = words.length - 1;
  while (start > 0 && (isOthers(words.slice(start).join(".")) || words[start] === "plugin")) start -= 1;
  return words.slice(start).join(".");
}

/** Return an interval as a bar around a line at 0; ``most`` is the end of the scale. */
function bar(row, most) {
  const place = value => `${(50 + 50 * Math.max(-1, Math.min(1, value / most))).toFixed(2)}%`;
  const parts = [make("i", { class: "zero" })];
  if (row.low !== null) parts.push(make("i", { class: "range", style: `left:${place(row.low)};right:calc(100% - ${place(row.high)})` }));
  if (row.delta !== null) parts.push(make("i", { class: "point", style: `left:${place(row.delta)}` }));
  return make("div", { class: `forest ${verdicts[row.verdict] || "muted"}`, role: "img", "aria-label": `difference ${digits(row.delta)} ${ends(row)}` }, parts);
}

function showDifferences(body, data) {
  const all = data.result.comparisons;
  if (!all.length) { body.append(make("p", { class: "muted" }, "One arm: no difference to show.")); return; }
  const box = make("div");
  const pick = make("select", { id: "other", change: () => draw() }, all.map((one, i) => make("option", { value: i }, one.other)));
  const draw = () => {
    const one = all[pick.value], rows = Object.entries(one.tasks);
    const most = Math.max(1e-9, ...rows.flatMap(([, row]) => [row.low, row.high, row.delta].filter(value => value !== null).map(Math.abs)));
    const paired = row => [["prompts", row.paired], ["seeds", row.paired_seeds]].filter(([, is]) => is).map(([name]) => name).join(", ") || "no";
    box.replaceChildren(
      table(`${one.other} against ${one.base}: 95 % interval of the difference`,
        ["task", "verdict", "base", "other", "difference", "interval", `−${digits(most)} … ${digits(most)}`, "metric", "runs", "prompts", "paired by"],
        rows.map(([task, row]) => [task,
          make("span", { class: verdicts[row.verdict] || "muted", title: row.reason || `p = ${digits(row.p_value)}` }, row.verdict),
          ...[row.before, row.after].map(writerOf(row)), signed(writerOf(row)(row.delta)), intervalOf(row), bar(row, most), row.metric, row.seeds.join(" + "), row.n, paired(row)])),
      make("ul", { class: "plain small" }, rows.filter(([, row]) => row.reason).map(([task, row]) => make("li", {}, `${task}: ${row.reason}`))),
      one.only_in_one.length ? make("p", { class: "small" }, `Tasks in only one of them: ${one.only_in_one.join(", ")}`) : "",
      make("p", { class: "small muted" }, "Where both arms have several runs, the interval is for other seeds and other prompts, else for other prompts alone. Each interval is 95 % by itself. The p-values of verdicts are corrected for all verdicts of this page (Holm)."));
  };
  body.append(make("p", { hidden: all.length < 2 }, make("label", { for: "other", class: "muted" }, `against ${all[0].base}: `), pick), box);
  bind("n", "next arm in the differences", () => { pick.value = (Number(pick.value) + 1) % all.length; draw(); get("differences").scrollIntoView(); });
  draw();
}

function showCurves(body, data) {
  const units = ["steps", ...["samples", "tokens", "seconds"].filter(unit => data.arms.some((_, i) => data.curves.some(curve => curve.arms[i] && curve.arms[i].spent[unit].every(value => value !== null))))];
  const pick = make("select", { id: "unit", change: () => draw() }, units.map(unit => make("option", {}, unit)));
  const charts = make("div");
  const draw = () => showSection(charts, "held-out", data.curves.map((curve, number) => {
    const unit = pick.value, lines = [];
    const at = arm => unit === "steps" ? arm.steps : arm.spent[unit];
    const own = curve.arms.map((arm, i) => ({ arm, name: data.arms[i].name })).filter(one => one.arm && at(one.arm).every(value => value !== null));
    const x = [...new Set(own.flatMap(one => at(one.arm)))].sort((a, b) => a - b);
    for (const { arm, name } of own) {
      const place = new Map(at(arm).map((value, i) => [value, i]));
      const spread = values => x.map(value => place.has(value) ? values[place.get(value)] : null);
      lines.push({ name, y: spread(arm.y), ...(arm.low.some(value => value !== null) && own.length < 9 ? { low: spread(arm.low), high: spread(arm.high) } : {}) });
    }
    return { id: `held-out-${number}`, title: curve.task, note: `${curve.metric}${own.length < 9 ? ", 95 % intervals" : ""}`, over: unit === "steps" ? "step" : unit, x, lines };
  }), data.arms.map(arm => arm.name), "");
  body.append(make("p", {}, make("label", { for: "unit", class: "muted" }, "over "), pick), charts);
  bind("u", "held-out curves over steps, samples, tokens, seconds", () => { pick.selectedIndex = (pick.selectedIndex + 1) % units.length; draw(); });
  draw();
}

const svg = (tag, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

function showTasks(body, data) {
  const choose = (id, at) => {
    const node = make("select", { id, change: () => draw() }, data.tasks.map((task, i) => make("option", { value: i }, task)));
    node.selectedIndex = at;
    return node;
  };
  const across = choose("across", 0), up = choose("up", 1), plot = make("div", { class: "card" });
  const draw = () => {
    const [x, y] = [data.tasks[across.value], data.tasks[up.value]];
    const own = data.arms.map(arm => ({ name: arm.name, x: arm.tasks[x], y: arm.tasks[y] })).filter(one => one.x && one.y && one.x.mean !== null && one.y.mean !== null);
    const width = Math.max(280, Math.min(760, plot.clientWidth - 26)), height = 380, pad = 64; // of a unit of a pixel: letters keep their size
    const most = Math.floor(width / 19); // letters of a name
    const range = side => {
      const means = own.map(one => one[side].mean), low = Math.min(...means), high = Math.max(...means);
      const widest = Math.max(0, ...own.map(one => one[side].low === null ? 0 : one[side].high - one[side].mean));
      const room = Math.min(1.1 * widest, 5 * (high - low)) || widest || 0.05; // an interval wider than this is cut at the frame
      return [low - Math.max(room, 0.08 * (high - low)), high + Math.max(room, 0.08 * (high - low))];
    };
    if (!own.length) { plot.replaceChildren(make("p", { class: "muted" }, "No arm has both tasks.")); return; }
    const [xs, ys] = [range("x"), range("y")];
    const inside = value => Math.max(0, Math.min(1, value));
    const px = value => pad + (width - pad - 12) * inside((value - xs[0]) / (xs[1] - xs[0]));
    const py = value => height - pad + 10 - (height - pad - 2) * inside((value - ys[0]) / (ys[1] - ys[0]));
    const ticks = ([low, high]) => { // round numbers, three to six of them
      const power = 10 ** Math.floor(Math.log10((high - low) / 3));
      const apart = power * [5, 2, 1].find(times => times * power <= (high - low) / 3), found = [];
      for (let i = Math.ceil(low / apart); i * apart <= high; i += 1) found.push(i * apart);
      return found;
    };
    const axes = [
      ...ticks(xs).flatMap(value => [svg("line", { x1: px(value), x2: px(value), y1: 12, y2: height - pad + 10, class: "grid" }), svg("text", { x: px(value), y: height - pad + 26, "text-anchor": "middle" }, digits(+value.toPrecision(3)))]),
      ...ticks(ys).flatMap(value => [svg("line", { x1: pad, x2: width - 12, y1: py(value), y2: py(value), class: "grid" }), svg("text", { x: pad - 6, y: py(value) + 4, "text-anchor": "end" }, digits(+value.toPrecision(3)))]),
      svg("text", { x: (width + pad) / 2, y: height - 6, "text-anchor": "middle" }, x), svg("text", { x: 12, y: height / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${height / 2})` }, y),
    ];
    const best = (one, other, side) => data.lower.includes(side === "x" ? x : y) ? one[side].mean <= other[side].mean : one[side].mean >= other[side].mean;
    const isBeaten = one => own.some(other => other !== one && best(other, one, "x") && best(other, one, "y") && !(best(one, other, "x") && best(one, other, "y")));
    const points = own.map((one, i) => {
      const colour = `var(--c${tone(one.name) % 10})`, beaten = isBeaten(one);
      const text = `${one.name}: ${x} ${digits(one.x.mean)} ${ends(one.x)}, ${y} ${digits(one.y.mean)} ${ends(one.y)}${beaten ? "; dominated" : "; not dominated"}`;
      const arms = own.length < 13 ? [
        one.x.low === null ? "" : svg("line", { x1: px(one.x.low), x2: px(one.x.high), y1: py(one.y.mean), y2: py(one.y.mean), stroke: colour, "stroke-opacity": 0.45 }),
        one.y.low === null ? "" : svg("line", { x1: px(one.x.mean), x2: px(one.x.mean), y1: py(one.y.low), y2: py(one.y.high), stroke: colour, "stroke-opacity": 0.45 })] : [];
      return svg("g", { tabindex: 0, role: "img", "aria-label": text }, svg("title", {}, text), ...arms,
        svg("circle", { cx: px(one.x.mean), cy: py(one.y.mean), r: 6, fill: beaten ? "var(--surface)" : colour, stroke: colour, "stroke-width": 2 }),
        own.length < 9 ? svg("text", { x: px(one.x.mean) + (px(one.x.mean) > width * 0.7 ? -10 : 10), y: py(one.y.mean) + (i % 2 ? 18 : -10), "text-anchor": px(one.x.mean) > width * 0.7 ? "end" : "start", class: "label" }, one.name.length > most ? `…${one.name.slice(1 - most)}` : one.name) : "");
    });
    plot.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "scatter", role: "group", "aria-label": `${y} against ${x}` }, ...axes, ...points),
      make("p", { class: "small muted" }, "filled: no other arm is as good or better in both tasks (Pareto); lines: 95 % intervals of the means"));
  };
  const found = Object.entries(data.result.dominates).filter(([, own]) => own.length);
  body.append(
    make("p", {}, make("label", { for: "across", class: "muted" }, "across "), across, make("label", { for: "up", class: "muted" }, " up "), up), plot, make("p"),
    found.length ? table("Arms that are as good or better in every task, by their means", ["arm", "dominates"], found.map(([arm, own]) => [named(arm), make("span", {}, own.join(", "))]))
      : make("p", { class: "muted" }, "No arm dominates another in all tasks: each is better somewhere."));
  new ResizeObserver(draw).observe(plot);
}

function showCosts(body, data) {
  const { result, arms } = data, units = ["steps", "samples", "tokens", "seconds"];
  const pick = make("select", { id: "cost", change: () => draw() }, units.map(unit => make("option", {}, unit)));
  pick.value = "samples";
  const box = make("div");
  const tasks = Object.keys(result.levels);
  const draw = () => box.replaceChildren(sorted(`${pick.value} until the first evaluation as good as the level; mean over the runs that reached it`,
    ["arm", ...tasks.map(task => `${task} ${digits(result.levels[task])}`)],
    arms.map((arm, i) => [[named(arm.name), arm.name], ...tasks.map(task => {
      const own = result.reached[i][task];
      if (!own.reached) return [own.runs ? "not reached" : "–", null];
      return [inUnit(own[pick.value], pick.value) + (own.reached < own.runs ? ` (${own.reached} of ${own.runs} runs)` : ""), own[pick.value]];
    })])));
  body.append(
    sorted("What a run of each arm has spent, mean; evaluations are not in the time", ["arm", "steps", "samples", "tokens", "time"],
      arms.map((arm, i) => [[named(arm.name), arm.name], ...units.map(unit => [inUnit(result.costs[i][unit], unit), result.costs[i][unit]])])),
    make("p"), make("p", {}, make("label", { for: "cost", class: "muted" }, `to reach ${data.level_is}, in `), pick), box);
  draw();
}

const prompts = {
  picked: -1, order: [],

  async build(body, data) {
    const { stored } = data;
    if (!stored.number) { body.append(make("p", { class: "muted" }, stored.why)); return; }
    this.arms = data.arms;
    this.all = await unpack(stored.texts);
    const own = this.controls = { find: make("input", { type: "search", id: "find", autocomplete: "off", spellcheck: "false", placeholder: "in prompts and responses", input: () => this.filter() }),
      task: make("select", { id: "task", change: () => this.filter() }, ["", ...new Set(this.all.map(one => one.task))].map(task => make("option", { value: task }, task || "all"))),
      sort: make("select", { id: "sort", change: () => this.filter() }, [["apart", "rewards furthest apart"], ["new", "newest"]].map(([value, text]) => make("option", { value }, text))) };
    this.count = make("p", { role: "status", class: "small muted" });
    this.list = make("div", { class: "card list", role: "group", "aria-label": "Prompts", tabindex: 0 });
    this.detail = make("div", {}, make("p", { class: "muted" }, "Choose a prompt: what each arm answered opens, side by side. ", make("kbd", {}, "j"), " and ", make("kbd", {}, "k"), " go through the list."));
    const input = (label, node) => make("label", { for: node.id }, label, node);
    body.append(make("form", { class: "filters", role: "search", submit: event => event.preventDefault() }, input("search", own.find), input("task", own.task), input("sorted by", own.sort)),
      this.count, make("div", { class: "browser" }, make("div", { class: "side" }, this.list), this.detail));
    this.more = stored.note;
    bind("j", "next prompt", () => this.move(1));
    bind("k", "previous prompt", () => this.move(-1));
    bind("/", "search in prompts", () => { own.find.focus(); own.find.scrollIntoView({ block: "center" }); });
    this.filter();
    performance.mark("prompts");
  },

  filter() {
    const query = this.controls.find.value.toLowerCase(), task = this.controls.task.value;
    const holds = one => !query || one.prompt.toLowerCase().includes(query) || one.answers.some(own => own.some(answer => answer.response.toLowerCase().includes(query)));
    this.order = this.all.map((_, i) => i).filter(i => (!task || this.all[i].task === task) && holds(this.all[i]));
    const key = this.controls.sort.value === "new" ? "step" : "apart";
    this.order.sort((a, b) => (this.all[b][key] ?? -1) - (this.all[a][key] ?? -1));
    this.count.textContent = `${this.order.length} of ${this.all.length} prompts that two arms or more answered. ${this.more}`;
    this.list.replaceChildren(...this.order.map(i => make("button", { type: "button", id: `prompt-${i}`, "aria-current": String(i === this.picked), click: () => this.open(i) },
      make("span", { class: "what" }, make("span", {}, this.all[i].task), make("b", {}, this.all[i].apart === null ? "–" : `± ${digits(this.all[i].apart)}`)),
      make("span", { class: "start", dir: "auto" }, ...shown(this.all[i].prompt.slice(-120))))));
  },

  move(by) {
    const now = this.order.indexOf(this.picked), next = this.order[Math.max(0, Math.min(this.order.length - 1, now + by))];
    if (next === undefined) return;
    this.open(next);
    get(`prompt-${next}`).scrollIntoView({ block: "nearest" });
  },

  open(i) {
    this.picked = i;
    for (const node of this.list.children) node.setAttribute("aria-current", String(node.id === `prompt-${i}`));
    const one = this.all[i];
    this.detail.replaceChildren(
      make("h3", { role: "status" }, `${one.task}, prompt ${one.id}`),
      make("details", { open: true }, make("summary", {}, "Prompt"), block(one.prompt, "Prompt")),
      one.reference ? make("details", {}, make("summary", {}, "Reference"), block(one.reference, "Reference")) : "", make("p"),
      make("div", { class: "siblings", tabindex: 0, role: "region", "aria-label": "Answers of the arms" }, one.answers.map((own, arm) => own.length ? make("article", {},
        make("h3", {}, named(this.arms[arm].name)),
        own.flatMap(answer => [make("h4", {}, `step ${answer.step}, seed ${answer.seed ?? "–"}, reward ${digits(answer.reward)} `,
          ...answer.marks.map(text => make("span", { class: "tag warn" }, text))), block(answer.response, "Response")])) : "").filter(Boolean)));
    below(this.detail);
  },
};

function showSettings(body, data) {
  const { result, arms } = data, keys = Object.entries(result.keys);
  body.append(
    keys.length ? table("Configuration that differs", ["key", ...arms.map(arm => named(arm.name))], keys.map(([key, own]) => [key, ...own.map(setting)]))
      : make("p", { class: "muted" }, arms.length > 1 ? "The recorded configurations do not differ." : "One configuration."),
    make("p"), table("Runs", ["run", "arm", "seed"], arms.flatMap(arm => arm.runs.map((run, i) => [run, named(arm.name), arm.seeds[i]]))),
    make("p"), data.left_out.length ? table("Runs left out", ["run", "why"], data.left_out.map(([run, why]) => [run, make("span", { class: "left" }, ...shown(why))])) : "");
}

start(showCompare);
