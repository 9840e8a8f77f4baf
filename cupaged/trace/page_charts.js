// The curves over all frames: drawn once a size, then copied under the cursor.

const $ = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return {pen, width, height};
}

class Charts {
  constructor(history, colors) {
    this.history = history;
    this.colors = colors;
    this.all = [this.drawUse(), this.drawQueue(), this.drawHappened()];
  }

  chart(id, most, draw) {
    const canvas = $(id), {pen, width, height} = prepare(canvas);
    const x = f => 6 + (width - 12) * (this.history.numFrames > 1 ? f / (this.history.numFrames - 1) : 0.5);
    const y = value => height - 4 - (height - 10) * value / Math.max(most, 1e-9);
    pen.strokeStyle = this.colors.line;
    for (const share of [0, 0.5, 1]) pen.strokeRect(6, y(most * share), width - 12, 0);
    draw(pen, x, y);
    pen.fillStyle = this.colors.soft;
    pen.font = "10px system-ui, sans-serif";
    pen.fillText(most.toLocaleString("en"), 9, y(most) + 10);
    const picture = document.createElement("canvas");
    picture.width = canvas.width;
    picture.height = canvas.height;
    picture.getContext("2d").drawImage(canvas, 0, 0);
    return {canvas, picture, x, height};
  }

  area(pen, x, y, values, color, base) {
    pen.beginPath();
    const last = this.history.numFrames - 1;
    for (let f = 0; f <= last; f++) pen.lineTo(x(f), y(values[f] + (base ? base[f] : 0)));
    for (let f = last; f >= 0; f--) pen.lineTo(x(f), y(base ? base[f] : 0));
    pen.fillStyle = color;
    pen.fill();
  }

  line(pen, x, y, values, color) {
    pen.beginPath();
    for (let f = 0; f < this.history.numFrames; f++) pen.lineTo(x(f), y(values[f]));
    pen.strokeStyle = color;
    pen.lineWidth = 1.4;
    pen.stroke();
    pen.lineWidth = 1;
  }

  title(id, parts) {
    $(id).replaceChildren(...parts.flatMap(([text, color], i) => {
      const item = document.createElement("i");
      item.textContent = text;
      item.style.color = color;
      return i ? [" · ", item] : [item];
    }));
  }

  drawUse() {
    const {series, config} = this.history, slots = series.stored.map(n => n / config.block_size);
    this.title("use-title", [["blocks in use", this.colors.accent], ["cached", this.colors.soft], ["full of tokens", "#4dd4ac"]]);
    return this.chart("use", config.num_blocks, (pen, x, y) => {
      this.area(pen, x, y, series.used, `${this.colors.accent}77`);
      this.area(pen, x, y, series.cached, `${this.colors.soft}55`, series.used);
      this.line(pen, x, y, slots, "#4dd4ac");
    });
  }

  drawQueue() {
    const {series} = this.history, most = Math.max(1, ...series.running, ...series.waiting);
    this.title("queue-title", [["sequences running", this.colors.accent], ["requests waiting", "#f8961e"], ["preemptions", "#ef476f"]]);
    return this.chart("queue", most, (pen, x, y) => {
      this.area(pen, x, y, series.running, `${this.colors.accent}55`);
      this.line(pen, x, y, series.waiting, "#f8961e");
      pen.fillStyle = "#ef476f";
      for (let f = 0; f < this.history.numFrames; f++)
        if (series.preemptions[f] > (f ? series.preemptions[f - 1] : 0)) pen.fillRect(x(f) - 0.75, y(most), 1.5, 7);
    });
  }

  drawHappened() {
    const {numFrames} = this.history, counts = HAPPENED.map(() => new Float32Array(numFrames));
    for (let f = 0; f < numFrames; f++) for (const [what] of this.history.eventsAt(f)) counts[what][f]++;
    const sums = counts[0].map((_, f) => counts.reduce((sum, c) => sum + c[f], 0));
    this.title("event-title", HAPPENED);
    return this.chart("happened", Math.max(1, ...sums), (pen, x, y) => {
      const width = Math.max(1, x(1) - x(0) - 0.5);
      for (let f = 0; f < numFrames; f++) {
        let below = 0;
        counts.forEach((count, what) => {
          if (!count[f]) return;
          pen.fillStyle = HAPPENED[what][1];
          pen.fillRect(x(f) - width / 2, y(below + count[f]), width, y(below) - y(below + count[f]));
          below += count[f];
        });
      }
    });
  }

  show(frame) {
    for (const {canvas, picture, x, height} of this.all) {
      const pen = canvas.getContext("2d");
      pen.save();
      pen.setTransform(1, 0, 0, 1, 0, 0);
      pen.clearRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(picture, 0, 0);
      pen.restore();
      pen.fillStyle = this.colors.text;
      pen.fillRect(x(frame) - 0.75, 0, 1.5, height);
    }
  }
}
