// The page of one run: what went wrong, tasks, charts, times, samples, decisions, setup.

const what = event => `${event.source === event.kind ? "" : `${event.source} `}${event.kind}${event.task ? ` · ${event.task}` : ""}`;
const told = event => make("li", { class: "told" }, make("span", { class: "muted" }, `step ${event.step}`),
  make("span", { class: alarming.has(event.kind) ? "bad" : "" }, what(event)),
  make("span", {}, ...shown(event.reason)));
let alarming = new Set();

function showRun(data) {
  const { result } = data;
  alarming = new Set(data.alarm_kinds);
  get("title").textContent = document.title = data.name;
  get("subtitle").textContent = data.subtitle;
  view.events = result.events.map(event => ({
    step: event.step, source: event.source, alarm: alarming.has(event.kind),
    text: `step ${event.step}, ${what(event)}: ${event.reason}`,
  }));
  data.tasks.forEach(reserve);
  const ends = data.charts.flatMap(chart => [chart.x[0], chart.x.at(-1)]);
  view.steps = Math.min(...ends) < Math.max(...ends) ? [Math.min(...ends), Math.max(...ends)] : null;
  showOverview(data);
  for (const [id, title] of data.sections) {
    const own = data.charts.filter(chart => chart.section === id);
    if (own.length) showSection(section(id, title), id, own, data.tasks, "dashed red: warning or alarm · tick: decision");
  }
  performance.mark("curves");
  if (data.spans.length) showTimes(section("time", "Time"), data);
  samples.update(data);
  const decisions = section("decisions", "Decisions");
  refresh(decisions, result.events, () => make("ul", { class: "plain scroll card", tabindex: 0, "aria-label": "Decisions" },
    result.events.length ? result.events.map(told) : make("li", {}, "none yet")));
  const setup = section("setup", "Setup");
  refresh(setup, [data.config, data.machine], () => [
    make("h3", {}, "Hardware and software"),
    Object.keys(data.machine).length
      ? make("dl", { class: "facts" }, Object.entries(data.machine).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, Array.isArray(value) ? value.join(", ") : digits(value))]))
      : make("p", { class: "muted" }, "not recorded: the run was made by an earlier version"),
    make("details", {}, make("summary", {}, "Configuration"), make("pre", { class: "text" }, ...shown(data.config)))]);
}

function showOverview(data) {
  const { result } = data;
  const body = section("overview", "Overview");
  refresh(body, [data.alarms, result.tasks, data.tiles, result.influence, result.constraints, data.gradients], () => {
    const verdicts = { better: "good", worse: "bad" };
    const rows = Object.entries(result.tasks).map(([task, row]) => [task,
      make("span", { class: verdicts[row.verdict] || "muted", title: row.reason || "" }, row.verdict), ...[row.before, row.after].map(writerOf(row)),
      signed(writerOf(row)(row.delta)), intervalOf(row), row.n, row.metric]);
    const limits = result.constraints.map(row => [`${row.task} · ${row.constraint}`, row.before, row.violation_rate, row.upper_bound, row.limit,
      make("span", { class: row.satisfied ? "good" : "bad" }, row.satisfied ? "kept" : "not shown to be kept")]);
    return [
      make("dl", { class: "tiles" }, data.tiles.map(([name, value, more]) =>
        make("div", {}, make("dt", {}, name), make("dd", {}, digits(value), more ? make("small", {}, more) : null)))),
      make("h3", {}, "What went wrong"),
      make("ul", { class: "plain scroll card", tabindex: 0, "aria-label": "What went wrong" }, data.alarms.length ? data.alarms.map(told) : make("li", { class: "good" }, "No warning, alarm or rollback.")),
      make("p"),
      table("Held out: first evaluation against last, 95 % intervals of the difference", ["task", "verdict", "first", "last", "difference", "interval", "n", "metric"], rows),
      make("ul", { class: "plain small" }, Object.entries(result.tasks).filter(([, row]) => row.reason).map(([task, row]) => make("li", {}, `${task}: ${row.reason}`))),
      make("p"),
      ...changed(result),
      data.gradients.steps ? gradients(data.gradients) : null,
      limits.length ? table("Limits of constraints at the last evaluation", ["constraint", "first rate", "rate", "upper bound", "limit", ""], limits) : null,
    ].filter(Boolean);
  });
}

/** Return the prompts that were won and lost, and what training on one task changed in others. */
function changed({ turnover, influence }) {
  const { intervals, effects, reason } = influence;
  const percent = value => `${(100 * value).toFixed(1)}%`;
  const trained = [...new Set(intervals.flatMap(own => Object.keys(own.shares)))];
  const tasks = [...new Set(intervals.flatMap(own => Object.keys(own.changes)))];
  const kinds = { better: "good", worse: "bad" };
  const found = Object.keys(turnover).length ? [table("Held-out prompts solved at the first evaluation and at the last",
    ["task", "both", "first, not last", "last, not first", "n"],
    Object.entries(turnover).map(([task, row]) => [task, percent(row.kept), percent(row.lost), percent(row.gained), row.n]))] : [];
  if (trained.length < 2) return found;
  if (effects.length) {
    const of = [...new Set(effects.map(row => row.task))];
    const cell = (task, other) => {
      const row = effects.find(one => one.trained === task && one.task === other);
      return make("span", { class: kinds[row.verdict] || "muted", title: row.verdict }, `${signed(writerOf(row)(row.effect))} ${intervalOf(row)}`);
    };
    found.push(table("Training on a task (row) changed a held-out result (column): in a mean interval between evaluations with prompts of that task alone, estimated from shares that change together",
      ["training on", ...of], trained.map(task => [task, ...of.map(other => cell(task, other))])));
  }
  if (reason) found.push(make("p", { class: "muted" }, `What training on one task changed in others is not told: ${reason}.`));
  const change = own => (own ? `${digits(own.delta)}${own.low === null ? "" : ` ± ${digits((own.high - own.low) / 2)}`}` : "–");
  found.push(make("details", {}, make("summary", {}, "Shares and changes between evaluations"),
    table("Share of the groups that gave a gradient (0: none of the task's did, whatever its weight), and change of each held-out result with the half width of its 95 % interval",
      ["steps", ...trained.map(task => `share ${task}`), ...tasks.map(task => `change ${task}`)],
      intervals.map(own => [`${own.steps[0]} to ${own.steps[1]}`, ...trained.map(task => own.shares[task] ?? "–"), ...tasks.map(task => change(own.changes[task]))]))));
  return found;
}

/** Return the matrix of the tasks' gradients: mean cosines, coloured where they are clearly not 0. */
function gradients({ steps, norms, cosines }) {
  const tasks = Object.keys(norms);
  const cell = (task, other) => {
    const [cosine, error] = cosines[task]?.[other] || [null, null];
    if (task === other || cosine === null) return "–";
    const isClear = error !== null && steps >= 5 && Math.abs(cosine) > 2 * error;
    const kind = !isClear ? "muted" : cosine > 0 ? "good" : "bad";
    const title = !isClear ? "not clearly different from 0" : cosine > 0 ? "they agree" : "they conflict";
    return make("span", { class: kind, title }, error === null ? digits(cosine) : `${digits(cosine)} ± ${digits(error)}`);
  };
  return table(`Tasks whose gradients agree (above 0) or conflict (below 0): mean cosine ± standard error over ${steps} steps`,
    ["task", "norm", ...tasks], tasks.map(task => [task, norms[task], ...tasks.map(other => cell(task, other))]));
}

function showTimes(body, data) {
  if (!body.rows) {
    body.rows = make("div");
    body.picker = make("select", { id: "span-step", change: () => draw() });
    body.append(make("div", { class: "card" }, make("h3", {}, "Timeline of stages"),
      make("p", { class: "small" }, make("label", { class: "muted", for: "span-step" }, "steps "), body.picker,
        make("span", { class: "muted" }, " filled: works · dashed: the update waits for it")), body.rows), make("div"));
  }
  const steps = [...new Set(data.spans.map(span => span[2]))].sort((a, b) => a - b);
  refresh(body.picker, steps, () => ["all", ...steps].map(step => make("option", { value: step }, step === "all" ? `last ${steps.length}` : String(step))));
  const draw = () => {
    const picked = body.picker.value;
    const own = data.spans.filter(span => picked === "all" || String(span[2]) === picked);
    refresh(body.rows, own, () => {
      const whole = own.filter(span => span[0] === "step");
      const from = Math.min(...own.map(span => span[3])), to = Math.max(...own.map(span => span[4]));
      const stages = [...new Set(own.map(span => span[0].replace("wait/", "") + (span[1] ? ` · ${span[1]}` : "")))];
      const place = value => `${(100 * (value - from) / Math.max(1e-9, to - from)).toFixed(3)}%`;
      const names = [...new Set(stages.map(stage => stage.split(" · ")[0]))];
      const rows = stages.map(stage => {
        const spans = own.filter(span => span[0].replace("wait/", "") + (span[1] ? ` · ${span[1]}` : "") === stage);
        const works = spans.filter(span => !span[0].startsWith("wait/")).reduce((sum, span) => sum + span[4] - span[3], 0);
        const waits = spans.filter(span => span[0].startsWith("wait/")).reduce((sum, span) => sum + span[4] - span[3], 0);
        const said = `${stage}: works ${duration(works)}${waits ? `, waited for ${duration(waits)}` : ""}`;
        return [make("span", { title: stage }, stage), make("div", { class: "row", role: "img", "aria-label": said, title: said }, spans.map(span =>
          make("i", { class: span[0].startsWith("wait/") ? "waits" : "", "--own": `var(--c${names.indexOf(stage.split(" · ")[0]) % 10})`,
            style: `left:${place(span[3])};width:${(100 * (span[4] - span[3]) / Math.max(1e-9, to - from)).toFixed(3)}%` })))];
      });
      return [make("div", { class: "gantt" }, rows.flat()), make("p", { class: "small muted" }, `${duration(to - from)}, ${whole.length} steps`)];
    });
  };
  draw();
  const shares = Object.entries(data.result.stages).map(([stage, own]) => [stage, share(own.busy), share(own.waited)]);
  refresh(body.lastChild, shares, () => table("Shares of the steps' time, whole run", ["stage", "works", "the update waits for it"], shares));
}
const share = value => `${(100 * value).toFixed(1)} %`;

// ---- samples --------------------------------------------------------------------------------------------

const SHOWN = 200;
const REJECTED = 1, VIOLATED = 2, JUDGED = 4, FAILED = 8, TRUNCATED = 16;

const samples = {
  columns: null, order: [], picked: -1, chunks: new Map(), lowered: new Map(), limit: SHOWN, mode: "plain", key: 0,

  build(body) {
    const input = (id, label, node) => { node.id = id; return make("label", { for: id }, label, node); };
    const pick = () => make("select", { change: () => this.filter() });
    const type = (attributes = {}) => make("input", { type: "search", autocomplete: "off", spellcheck: "false", input: () => this.filter(150), ...attributes });
    this.controls = {
      task: pick(), verdict: pick(), failure: pick(), sort: pick(), group: type({ placeholder: "part of its name" }),
      from: type({ id: "from", type: "number", min: 0, "aria-label": "first step", placeholder: "first" }),
      to: type({ id: "to", type: "number", min: 0, "aria-label": "last step", placeholder: "last" }),
      find: type({ placeholder: "in prompt and response" }),
    };
    const own = this.controls;
    for (const [value, text] of [["new", "newest"], ["low", "lowest reward"], ["high", "highest reward"], ["long", "longest"]]) own.sort.append(make("option", { value }, text));
    this.count = make("p", { role: "status", class: "small muted" });
    this.fresh = make("button", { type: "button", hidden: true, click: () => { this.fresh.hidden = true; this.filter(); } });
    this.list = make("div", { class: "card list", role: "group", "aria-label": "Samples", tabindex: 0 });
    this.detail = make("div", { id: "group" }, make("p", { class: "muted" }, "Choose a sample: its whole group opens, side by side. ", make("kbd", {}, "j"), " and ", make("kbd", {}, "k"), " go through the list."));
    this.distributions = make("div", { class: "charts" });
    body.append(
      make("form", { class: "filters", role: "search", submit: event => { event.preventDefault(); document.activeElement.blur(); } },
        input("find", "search", own.find), input("task", "task", own.task),
        make("label", {}, "steps", make("span", { class: "pair" }, own.from, own.to)),
        input("group-name", "prompt (group)", own.group), input("verdict", "verdict", own.verdict),
        input("failure", "failure", own.failure), input("sort", "sorted by", own.sort)),
      this.distributions, make("p"), this.count, make("div", { class: "browser" }, make("div", { class: "side" }, this.fresh, this.list), this.detail));
    bind("j", "next sample", () => this.move(1));
    bind("k", "previous sample", () => this.move(-1));
    bind("/", "search in samples", () => { own.find.focus(); own.find.scrollIntoView({ block: "center" }); });
    bind("c", "colour of tokens: none, probability, advantage", () => this.paint());
    bind("x", "clear the filters", () => { for (const node of Object.values(own)) node.value = node === own.sort ? "new" : ""; this.filter(); });
  },

  async update(data) {
    const body = section("samples", "Samples");
    const { samples: stored } = data;
    if (!this.list) this.build(body);
    const columns = typeof stored.columns === "string" ? await unpack(stored.columns) : stored.columns;
    const known = this.columns ? this.columns.task.length : 0;
    this.stored = stored;
    this.names = stored.names;
    if (this.version !== stored.version) { this.chunks.clear(); this.lowered.clear(); this.picked = -1; }
    const last = Math.floor(known / stored.chunk_size); // it may have got more samples
    for (const kind of ["texts", "tokens"]) this.chunks.delete(`${kind}/${last}`);
    this.lowered.delete(last);
    const isNew = this.version !== stored.version || columns.task.length !== known;
    this.version = stored.version;
    this.columns = columns;
    const options = (node, entries) => refresh(node, entries, () => entries.map(([value, text]) => make("option", { value }, text)));
    for (const [node, entries] of [
      [this.controls.task, [["", "all"], ...stored.names.task.map((name, i) => [String(i), name])]],
      [this.controls.verdict, [["", "any"], ["refused", "refused"], ["violated", "violated"], ["kept", "satisfied"], ["unjudged", "not judged"],
        ...stored.names.constraint.map((name, i) => [`c${i}`, `violated: ${name}`])]],
      [this.controls.failure, [["", "any"], ["none", "none"], ["any", "failed"], ["cut", "cut at the token limit"], ...stored.names.failure.map((name, i) => [`f${i}`, `failed: ${name}`])]],
    ]) {
      const value = node.value;
      options(node, entries);
      node.value = value;
    }
    if (!isNew) return;
    const reading = known && (this.picked >= 0 || this.list.scrollTop > 0 || document.activeElement === this.controls.find);
    if (!reading) { this.filter(); return; }
    this.fresh.textContent = `show ${this.columns.task.length - known} new samples`;
    this.fresh.hidden = false;
  },

  /** Whether sample ``i`` passes every filter but the search. */
  passes(i) {
    const own = this.controls, at = this.columns, flags = at.flags[i];
    if (own.task.value !== "" && at.task[i] !== Number(own.task.value)) return false;
    if (own.from.value !== "" && at.step[i] < Number(own.from.value)) return false;
    if (own.to.value !== "" && at.step[i] > Number(own.to.value)) return false;
    const verdict = own.verdict.value, failure = own.failure.value;
    if (verdict === "refused" && !(flags & REJECTED) || verdict === "violated" && !(flags & VIOLATED)) return false;
    if (verdict === "kept" && (flags & (VIOLATED | JUDGED)) !== JUDGED || verdict === "unjudged" && flags & JUDGED) return false;
    if (verdict[0] === "c" && !(at.violated[i] & 1 << Number(verdict.slice(1)))) return false;
    if (failure === "none" && flags & FAILED || failure === "any" && !(flags & FAILED) || failure === "cut" && !(flags & TRUNCATED)) return false;
    if (failure[0] === "f" && at.failure[i] !== Number(failure.slice(1))) return false;
    return !own.group.value || this.names.prompt[at.prompt[i]].toLowerCase().includes(own.group.value.toLowerCase());
  },

  filter(delay = 0) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.run(), delay);
  },

  async run() {
    const key = ++this.key, at = this.columns, query = this.controls.find.value.toLowerCase();
    let order = [];
    for (let i = at.task.length - 1; i >= 0; i--) if (this.passes(i)) order.push(i);
    if (query) {
      const found = [];
      for (const i of order) {
        const texts = this.lowered.get(this.place(i)[0]) || await this.lower(this.place(i)[0]);
        if (key !== this.key) return;
        if (texts[this.place(i)[1]].includes(query)) found.push(i);
      }
      order = found;
    }
    const sort = this.controls.sort.value, reward = i => at.reward[i] ?? (sort === "low" ? Infinity : -Infinity);
    if (sort === "low") order.sort((a, b) => reward(a) - reward(b));
    if (sort === "high") order.sort((a, b) => reward(b) - reward(a));
    if (sort === "long") order.sort((a, b) => at.length[b] - at.length[a]);
    this.order = order;
    this.limit = SHOWN;
    this.list.scrollTop = 0;
    const { left_out: left } = this.stored;
    this.count.textContent = `${order.length.toLocaleString()} of ${at.task.length.toLocaleString()} samples`
      + (left ? `; ${left.toLocaleString()} older ones are in rollouts.jsonl alone` : "");
    showCharts(this.distributions, [
      this.distribution("rewards", "Rewards", at.reward, "reward"), this.distribution("lengths", "Lengths", at.length, "tokens")]);
    await this.rows();
  },

  /** Return a histogram of the samples in the list, a line per task. */
  distribution(id, title, values, over) {
    const own = this.order.filter(i => values[i] !== null);
    let low = Infinity, high = -Infinity;
    for (const i of own) { low = Math.min(low, values[i]); high = Math.max(high, values[i]); }
    if (!own.length) return { id, title, x: [0, 1], lines: [], over, bars: true, note: "no value" };
    const bins = 24, width = (high - low) / bins || 1;
    const tasks = [...new Set(own.map(i => this.columns.task[i]))].sort((a, b) => a - b);
    const lines = tasks.map(task => ({ name: this.names.task[task], y: Array(bins + 1).fill(0) }));
    for (const i of own) lines[tasks.indexOf(this.columns.task[i])].y[Math.min(bins - 1, Math.floor((values[i] - low) / width))] += 1;
    return { id, title, lines, over, bars: true, chips: true, x: Array.from({ length: bins + 1 }, (_, k) => +(low + k * width).toPrecision(6)),
      note: `of the ${own.length.toLocaleString()} samples in the list` };
  },

  place(i) { return [Math.floor(i / this.stored.chunk_size), i % this.stored.chunk_size]; },

  /** Return a chunk of samples: what ``kind``, "texts" or "tokens", says of each; none if the page has none. */
  async chunk(kind, index) {
    const { version } = this.stored, own = this.stored[kind], name = `${kind}/${index}`;
    const load = async () => {
      const answer = await fetch(`${kind}/${version}/${index}`, { cache: "no-store" });
      if (answer.ok) return answer.json();
      this.chunks.delete(name);
      throw new Error(await answer.text());
    };
    if (!this.chunks.has(name)) this.chunks.set(name, !own ? load() : own[index] ? unpack(own[index]) : []);
    return this.chunks.get(name);
  },

  async lower(index) {
    if (!this.lowered.has(index)) this.lowered.set(index, (await this.chunk("texts", index)).map(one => `${one.prompt}\n${one.response}`.toLowerCase()));
    return this.lowered.get(index);
  },

  async sample(i) {
    const [chunk, at] = this.place(i);
    return (await this.chunk("texts", chunk))[at];
  },

  async tokens(i) {
    const [chunk, at] = this.place(i);
    return (await this.chunk("tokens", chunk))[at];
  },

  async rows() {
    const key = this.key, at = this.columns, rows = [];
    for (const i of this.order.slice(0, this.limit)) {
      const one = await this.sample(i);
      if (key !== this.key) return;
      const flags = at.flags[i];
      rows.push(make("button", { type: "button", id: `sample-${i}`, "aria-current": String(i === this.picked), click: () => this.open(i) },
        make("span", { class: "what" }, make("span", {}, `${at.step[i]} · ${this.names.task[at.task[i]]} `, ...marks(flags)), make("b", {}, digits(at.reward[i]))),
        make("span", { class: "start", dir: "auto" }, ...shown(one.response.slice(0, 120)))));
    }
    if (this.order.length > this.limit) {
      rows.push(make("button", { type: "button", click: () => { this.limit += SHOWN; this.rows(); } }, `show ${Math.min(SHOWN, this.order.length - this.limit)} more`));
    }
    performance.mark("samples"); // for benchmarks/report_page.py
    this.list.replaceChildren(...(rows.length ? rows : [make("p", { class: "muted", style: "padding:.75rem" }, at.task.length ? "No sample passes the filters." : "The run stored no samples (tracking.store_rollouts).")]));
  },

  move(by) {
    const now = this.order.indexOf(this.picked);
    const next = this.order[Math.max(0, Math.min(this.order.length - 1, now + by))];
    if (next === undefined) return;
    this.open(next);
    get(`sample-${next}`)?.scrollIntoView({ block: "nearest" });
  },

  async open(i) {
    this.picked = i;
    for (const node of this.list.children) node.setAttribute("aria-current", String(node.id === `sample-${i}`));
    const at = this.columns, siblings = [];
    const isSibling = j => at.task[j] === at.task[i] && at.step[j] === at.step[i] && at.prompt[j] === at.prompt[i] && at.draw[j] === at.draw[i];
    for (let j = i; j >= 0 && at.step[j] === at.step[i]; j--) if (isSibling(j)) siblings.unshift(j);
    for (let j = i + 1; j < at.task.length && at.step[j] === at.step[i]; j++) if (isSibling(j)) siblings.push(j);
    const found = await Promise.all(siblings.map(async j => [j, { ...await this.sample(j), tokens: await this.tokens(j) }]));
    if (this.picked !== i) return;
    found.sort(([, a], [, b]) => a.sample - b.sample || a.attempt - b.attempt);
    this.opened = found;
    this.render();
    below(this.detail);
  },

  paint() {
    const modes = ["plain", "probability", "advantage"];
    this.mode = modes[(modes.indexOf(this.mode) + 1) % 3];
    this.render();
  },

  render() {
    if (!this.opened) return;
    const i = this.picked, at = this.columns, first = this.opened[0][1];
    const most = Math.max(1e-9, ...this.opened.flatMap(([, one]) => one.tokens ? [].concat(one.tokens.advantages).map(Math.abs) : []));
    const modes = ["plain", "probability", "advantage"].map(mode => make("button", { type: "button", "aria-pressed": String(mode === this.mode), click: () => { this.mode = mode; this.render(); } }, mode));
    const hasTokens = this.opened.some(([, one]) => one.tokens);
    const scales = {
      plain: hasTokens ? "" : "not stored, or left out of this page",
      probability: make("span", { class: "scale" }, "likely", make("i", { style: "background:linear-gradient(90deg,transparent,rgba(var(--rare),.75))" }), "unlikely when sampled"),
      advantage: make("span", { class: "scale" }, digits(-most), make("i", { style: "background:linear-gradient(90deg,rgba(var(--minus),.7),transparent,rgba(var(--plus),.7))" }), `+${digits(most)}`),
    };
    const facts = Object.entries(first.row || {}).map(([name, value]) => [name, make("span", {}, ...shown(typeof value === "string" ? value : JSON.stringify(value)))]);
    const scroll = this.detail.querySelector(".siblings")?.scrollLeft || 0;
    const row = make("div", { class: "siblings", tabindex: 0, role: "region", "aria-label": "Samples of the group" }, this.opened.map(([j, one]) => this.card(j, one, most)));
    this.detail.replaceChildren(
      make("h3", { role: "status" }, `${this.names.task[at.task[i]]}, step ${at.step[i]}, prompt ${this.names.prompt[at.prompt[i]]}`),
      make("p", { class: "small muted" }, `${this.opened.length} stored ${this.opened.length === 1 ? "sample" : "samples"} of the group`),
      make("details", { open: true }, make("summary", {}, "Prompt"), block(first.prompt, "Prompt")),
      facts.length ? make("details", {}, make("summary", {}, "Row of the data set"), make("div", { class: "wide" }, make("table", {}, make("tbody", {}, facts.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", { class: "left", style: "white-space:normal" }, value))))))) : "",
      make("div", { class: "chips", role: "group", "aria-label": "Colour of tokens", style: "margin-top:.75rem" }, make("span", { class: "small muted" }, "tokens"), modes, make("span", { class: "small muted" }, scales[this.mode])),
      row);
    row.scrollLeft = scroll;
    const chosen = row.querySelector(".chosen");
    if (chosen.offsetLeft - row.offsetLeft + chosen.offsetWidth > scroll + row.clientWidth || chosen.offsetLeft - row.offsetLeft < scroll) row.scrollLeft = chosen.offsetLeft - row.offsetLeft;
  },

  card(j, one, most) {
    const flags = this.columns.flags[j];
    const parts = [];
    const results = Object.entries(one.breakdown || {});
    if (results.length) {
      parts.push(make("h4", {}, "Rewards"), make("table", {}, make("tbody", {}, results.flatMap(([name, result]) => [
        make("tr", {}, make("th", { scope: "row", class: "left" }, name), make("td", {}, outcome(result))),
        ...Object.entries(result.components || {}).map(([part, value]) => make("tr", { class: "muted" }, make("td", { class: "left" }, `  ${part}`), make("td", {}, digits(value))))]))));
    }
    const verdicts = Object.entries(one.verdicts || {});
    if (verdicts.length) {
      parts.push(make("h4", {}, flags & REJECTED ? "Why refused" : "Constraints"), make("ul", { class: "plain small" }, verdicts.map(([name, verdict]) => make("li", {},
        make("strong", { class: verdict.violated ? "bad" : "" }, name), ": ", ...(verdict.failure ? [`failed: ${verdict.failure.kind}: `, ...shown(verdict.failure.message)]
          : verdict.applicable === false ? ["does not apply"] : [`${verdict.violated ? "violated" : "satisfied"}, cost ${digits(verdict.cost)}${verdict.reason ? ": " : ""}`, ...shown(verdict.reason || "")])))));
    }
    if (one.failure) parts.push(make("p", { class: "bad small" }, `failed (${one.failure.kind}${one.failure.source ? `, ${one.failure.source}` : ""}): `, ...shown(one.failure.message)));
    const title = make("h3", {}, `sample ${one.sample}${one.attempt ? `, attempt ${one.attempt + 1}` : ""}`, make("span", {}, `reward ${digits(this.columns.reward[j])}`), ...marks(flags),
      make("span", { class: "muted small" }, `${this.columns.length[j]} tokens, ended by ${one.finish_reason}`));
    return make("article", { class: j === this.picked ? "chosen" : "" }, title, ...this.response(one, most), ...parts);
  },

  /** Return the answers of a sample, turn by turn; with tokens in the chosen colour if they are stored. */
  response(one, most) {
    const pieces = this.mode === "plain" ? null : coloured(one, this.mode, most);
    if (!one.turns) return [pieces ? answer(pieces) : block(one.response, "Response")];
    let at = 0;
    return one.turns.flatMap((turn, number) => {
      const own = pieces?.slice(at, at + turn.num_tokens);
      at += turn.num_tokens;
      return [...turn.messages.map(message => make("div", { class: "turn" }, make("h4", {}, message.role || "world"), block(typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? message), "Message of the world"))),
        make("div", { class: "turn own" }, make("h4", {}, `turn ${number + 1}${turn.reward === null || turn.reward === undefined ? "" : `, reward ${typeof turn.reward === "number" ? digits(turn.reward) : JSON.stringify(turn.reward)}`}`), own ? answer(own) : block(turn.response, "Answer"))];
    });
  },
};

const answer = pieces => make("pre", { class: "text", dir: "auto", tabindex: 0, role: "group", "aria-label": "Response, token by token" }, pieces);
const outcome = result => result.failure ? make("span", { class: "bad" }, result.failure.kind) : result.not_applicable ? "does not apply" : digits(result.value);

/** Return the labels of what happened to a sample. */
function marks(flags) {
  const found = [[REJECTED, "refused", "bad"], [FAILED, "failed", "bad"], [TRUNCATED, "cut", "warn"]];
  const own = found.filter(([bit]) => flags & bit);
  if (!(flags & REJECTED) && flags & VIOLATED) own.push([VIOLATED, "violated", "warn"]);
  return own.flatMap(([, text, kind]) => [make("span", { class: `tag ${kind}` }, text), " "]);
}

/** Return the tokens of a response as coloured nodes; null without stored tokens. */
function coloured(one, mode, most) {
  if (!one.tokens) return null;
  const { texts, logprobs, advantages } = one.tokens;
  return texts.map((text, i) => {
    const chance = logprobs.length ? Math.exp(logprobs[i]) : null;
    const advantage = Array.isArray(advantages) ? advantages[i] ?? null : advantages;
    const said = [chance === null ? "" : `probability ${digits(chance)} (${digits(logprobs[i])} nats)`, advantage === null ? "not trained on" : `advantage ${digits(advantage)}`].filter(Boolean).join(", ");
    const strength = mode === "probability" ? (chance === null ? 0 : Math.min(1, -logprobs[i] / 5)) : Math.min(1, Math.abs(advantage || 0) / most);
    const tone = mode === "probability" ? "--rare" : advantage > 0 ? "--plus" : "--minus";
    return make("span", { class: "token", title: said, style: strength > 0.01 ? `background:rgba(var(${tone}),${(0.75 * strength).toFixed(2)})` : null }, ...shown(text));
  });
}

start(showRun);
