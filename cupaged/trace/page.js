// The pools at a frame, what is said of it, and what a user may do.

// How `number` cells, square or a little taller, fill a canvas.
function gridOf(number, width, height) {
  const pad = 8, w = width - 2 * pad, h = height - 2 * pad;
  let columns = Math.max(1, Math.ceil(Math.sqrt(number * w / h)));
  if (w / columns > 60) columns = Math.min(number, Math.floor(w / 60)) || 1;
  const cell = Math.min(60, w / columns), tall = Math.min(cell * 1.3, h / Math.max(1, Math.ceil(number / columns)));
  return {cell, tall, pad, columns};
}

class View {
  constructor(history, name) {
    this.history = history;
    this.frame = 0;
    this.chosen = -1; // arrival of the request that is followed
    this.timer = 0;
    this.grids = {};
    $("name").textContent = name;
    $("slider").max = history.numFrames - 1;
    $("host-part").hidden = history.config.num_host_blocks === 0;
    this.showSettings();
    this.listen();
    this.resize();
  }

  color(owner, state) {
    if (state === FREE) return this.colors.free;
    const hue = (owner * 137.508) % 360;
    return state === USED ? `hsl(${hue} ${this.colors.sat} ${this.colors.used})`
      : `hsl(${hue} 34% ${this.colors.cached})`;
  }

  showSettings() {
    const c = this.history.config;
    const chips = [[c.num_blocks, `blocks of ${c.block_size} tokens`], [c.num_host_blocks, "host blocks"],
      [c.max_num_seqs, "sequences at most"], [c.max_num_batched_tokens, "tokens a step"], [c.policy, ""],
      [c.preemption_mode, "preemption"], [c.enable_prefix_caching ? "prefix cache" : "no prefix cache", ""],
      [this.history.requests.length, "requests"]];
    $("chips").replaceChildren(...chips.map(([value, text]) => {
      const item = document.createElement("li"), bold = document.createElement("b");
      bold.textContent = value;
      item.append(bold, text ? ` ${text}` : "");
      return item;
    }));
  }

  showLegend() {
    const entries = [
      ["free", `background:${this.colors.free}`],
      ["in use, by request", `background:conic-gradient(${[0, 90, 180, 270, 360].map(h =>
        `hsl(${h} ${this.colors.sat} ${this.colors.used})`)})`],
      ["cached, nobody holds it", `background:${this.color(0, CACHED)}`],
      ["shared: more than one table", `background:radial-gradient(${this.colors.ring} 32%, ${this.color(3, USED)} 36%)`],
      ...HAPPENED.map(([text, color]) => [text, `border:2px solid ${color}`]),
    ];
    $("legend").replaceChildren(...entries.map(([text, style]) => {
      const item = document.createElement("li"), swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.cssText = style;
      item.append(swatch, text);
      return item;
    }));
  }

  resize() {
    this.colors = {free: css("--free"), used: css("--used-light"), cached: css("--cached-light"),
      sat: css("--sat"), ring: css("--ring"), line: css("--line"), soft: css("--soft"), text: css("--text"),
      accent: css("--accent")};
    this.showLegend();
    this.charts = new Charts(this.history, this.colors);
    this.show(this.frame);
  }

  show(frame) {
    this.frame = Math.max(0, Math.min(this.history.numFrames - 1, frame));
    this.words = this.history.wordsAt(this.frame);
    this.happened = this.history.eventsAt(this.frame);
    $("slider").value = this.frame;
    this.drawPool("device", 0, this.history.numDevice);
    if (this.history.config.num_host_blocks) this.drawPool("host", this.history.numDevice, this.history.numBlocks);
    this.charts.show(this.frame);
    this.showFacts();
    document.body.dataset.frame = this.frame;
  }

  drawPool(id, from, to) {
    const {pen, width, height} = prepare($(id));
    const grid = this.grids[id] = {...gridOf(to - from, width, height), from, to};
    const {cell, tall, pad, columns} = grid, least = Math.min(cell, tall), gap = least > 3 ? 1 : 0;
    const place = block => { // whole pixels, so that gaps are even
      const column = (block - from) % columns, row = Math.floor((block - from) / columns);
      const x = Math.round(pad + column * cell), y = Math.round(pad + row * tall);
      return [x, y, Math.round(pad + (column + 1) * cell) - x - gap, Math.round(pad + (row + 1) * tall) - y - gap];
    };
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = `600 ${Math.round(least * 0.42)}px system-ui, sans-serif`;
    for (let block = from; block < to; block++) {
      const word = this.words[block], state = stateOf(word), references = referencesOf(word);
      const [x, y, w, h] = place(block);
      pen.globalAlpha = this.chosen >= 0 && state !== FREE && ownerOf(word) !== this.chosen ? 0.16 : 1;
      pen.fillStyle = this.color(ownerOf(word), state);
      pen.fillRect(x, y, w, h);
      if (references > 1) {
        pen.fillStyle = this.colors.ring;
        if (least >= 18) pen.fillText(references, x + w / 2, y + h / 2 + 1);
        else pen.fillRect(x + w * 0.3, y + h * 0.3, w * 0.4, h * 0.4);
      }
    }
    pen.globalAlpha = 1;
    const ring = Math.max(1.2, Math.min(3, least * 0.16));
    pen.lineWidth = ring;
    for (const [what, block] of this.happened) {
      if (block < from || block >= to) continue;
      const [x, y, w, h] = place(block);
      pen.strokeStyle = HAPPENED[what][1];
      pen.strokeRect(x + ring / 2, y + ring / 2, w - ring, h - ring);
    }
  }

  showFacts() {
    const h = this.history, s = h.series, f = this.frame, c = h.config;
    const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)} %` : "-";
    $("step").textContent = h.steps[f].toLocaleString("en");
    $("time").textContent = `${s.time[f].toFixed(3)} s`;
    $("device-facts").textContent = `${s.used[f]} of ${c.num_blocks} in use, ${s.cached[f]} cached`;
    $("host-facts").textContent = `${s.host_used[f]} of ${c.num_host_blocks} in use`;
    const counts = HAPPENED.map((_, what) => this.happened.filter(e => e[0] === what).length);
    const facts = [["tokens in the step", s.tokens[f]], ["decodes", s.decodes[f]], ["sequences running", s.running[f]],
      ["requests waiting", s.waiting[f]], ["blocks in use", share(s.used[f], c.num_blocks)],
      ["of their slots, filled", share(s.stored[f], s.used[f] * c.block_size)], ["preemptions so far", s.preemptions[f]],
      ["tokens recomputed", s.recomputed_tokens[f]], ["prompt tokens found", s.hit_tokens[f]],
      ...HAPPENED.map(([text], what) => [`${text} now`, counts[what]])];
    $("facts").replaceChildren(...facts.flatMap(([name, value]) => {
      const term = document.createElement("dt"), text = document.createElement("dd");
      term.textContent = name;
      text.textContent = typeof value === "number" ? value.toLocaleString("en") : value;
      return [term, text];
    }));
    this.showOwners();
  }

  showOwners() {
    const held = new Map();
    for (const word of this.words)
      if (stateOf(word) === USED) held.set(ownerOf(word), (held.get(ownerOf(word)) || 0) + 1);
    const owners = [...held].sort((a, b) => b[1] - a[1]).slice(0, 40);
    $("owners").replaceChildren(...owners.map(([owner, number]) => {
      const item = document.createElement("li"), swatch = document.createElement("span"), text = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = this.color(owner, USED);
      text.textContent = `request ${owner}`;
      item.className = owner === this.chosen ? "chosen" : "";
      item.append(swatch, text, String(number));
      item.onclick = () => this.choose(owner);
      return item;
    }));
  }

  // What the user does.

  choose(owner) {
    this.chosen = this.chosen === owner ? -1 : owner;
    this.show(this.frame);
  }

  play(on) {
    clearInterval(this.timer);
    this.timer = 0;
    $("play").textContent = on ? "Pause" : "Play";
    if (!on) return;
    if (this.frame === this.history.numFrames - 1) this.show(0);
    const rate = Number($("speed").value), ticks = Math.min(rate, 30);
    this.timer = setInterval(() => {
      this.show(this.frame + Math.round(rate / ticks));
      if (this.frame === this.history.numFrames - 1) this.play(false);
    }, 1000 / ticks);
  }

  nextEvent() {
    const {event_start: start, numFrames} = this.history;
    for (let f = this.frame + 1; f < numFrames; f++) if (start[f + 1] > start[f]) return this.show(f);
  }

  blockAt(id, event) {
    const {cell, tall, pad, columns, from, to} = this.grids[id];
    const column = Math.floor((event.offsetX - pad) / cell), row = Math.floor((event.offsetY - pad) / tall);
    const block = from + row * columns + column;
    return column >= 0 && column < columns && row >= 0 && block < to ? block : -1;
  }

  describe(block) {
    const word = this.words[block], state = stateOf(word), host = block >= this.history.numDevice;
    const lines = [host ? `host block ${block - this.history.numDevice}` : `block ${block}`];
    if (state === FREE) lines.push("free");
    else {
      const [time, prompt, most, n, isBeam, priority] = this.history.requests[ownerOf(word)];
      const references = referencesOf(word), tables = references > 1 ? `${references} tables` : "1 table";
      lines.push(state === USED ? `held by ${tables}` : "cached, nobody holds it; the oldest goes first",
        `request ${ownerOf(word)}${isBeam ? `, ${n} beams` : n > 1 ? `, n = ${n}` : ""}`,
        `${prompt} tokens of prompt, ${most} at most, at ${time.toFixed(3)} s`);
      if (priority) lines.push(`priority ${priority}`);
    }
    for (const [what, at] of this.happened) if (at === block) lines.push(HAPPENED[what][0]);
    return lines.join("\n");
  }

  listen() {
    for (const id of ["device", "host"]) {
      $(id).addEventListener("mousemove", event => {
        const block = this.blockAt(id, event), tip = $("tip");
        tip.hidden = block < 0;
        if (block < 0) return;
        tip.textContent = this.describe(block);
        tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
        tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
      });
      $(id).addEventListener("mouseleave", () => { $("tip").hidden = true; });
      $(id).addEventListener("click", event => {
        const block = this.blockAt(id, event);
        this.choose(block >= 0 && stateOf(this.words[block]) !== FREE ? ownerOf(this.words[block]) : this.chosen);
      });
    }
    for (const id of ["use", "queue", "happened"]) {
      const seek = event => {
        if (event.buttons !== 1) return;
        this.show(Math.round((event.offsetX - 6) / ($(id).clientWidth - 12) * (this.history.numFrames - 1)));
      };
      $(id).addEventListener("mousedown", seek);
      $(id).addEventListener("mousemove", seek);
    }
    $("slider").addEventListener("input", () => this.show(Number($("slider").value)));
    $("play").addEventListener("click", () => this.play(!this.timer));
    $("speed").addEventListener("change", () => this.timer && this.play(true));
    addEventListener("resize", () => this.resize());
    matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => this.resize());
    addEventListener("keydown", event => this.onKey(event));
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    const stride = event.shiftKey ? 10 : 1;
    const actions = {
      ArrowLeft: () => this.show(this.frame - stride),
      ArrowRight: () => this.show(this.frame + stride),
      Home: () => this.show(0),
      End: () => this.show(this.history.numFrames - 1),
      " ": () => this.play(!this.timer),
      e: () => this.nextEvent(),
      Escape: () => this.choose(this.chosen),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}

async function start() {
  const data = JSON.parse($("data").textContent);
  const view = new View(new History(data, await unpack(data.packed)), data.name);
  const wanted = /^#(\d+)$/.exec(location.hash); // a link to a frame
  if (wanted) view.show(Number(wanted[1]));
  document.body.dataset.ready = "yes";
}

start().catch(error => {
  document.body.dataset.error = String(error);
  $("name").textContent = `This page cannot be shown (${error}); a newer browser may.`;
});
