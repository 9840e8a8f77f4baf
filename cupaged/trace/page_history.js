"use strict";
// What a trace's page knows. A frame is what a step's plan leaves; words and events are packed as pool_history.py
// says. Frames are differences: every KEY_EVERY-th state is kept whole, so that any is near.

const FREE = 0, CACHED = 1, USED = 2;
const HAPPENED = [
  ["prefix hit", "#ffd166"],
  ["copied on write", "#c77dff"],
  ["swapped in", "#4cc9f0"],
  ["swapped out", "#f8961e"],
  ["evicted", "#ef476f"],
];
const KEY_EVERY = 32;

const stateOf = word => (word >>> 10) & 3;
const ownerOf = word => word >>> 12;
const referencesOf = word => word & 1023;

class History {
  constructor(data, buffer) {
    this.config = data.config;
    this.requests = data.requests;
    let offset = 0;
    for (const [name, size, kind] of data.arrays) {
      this[name] = kind === "u" ? new Uint32Array(buffer, offset, size) : new Float32Array(buffer, offset, size);
      offset += 4 * size;
    }
    this.numFrames = this.steps.length;
    this.numDevice = data.config.num_blocks;
    this.numBlocks = data.config.num_blocks + data.config.num_host_blocks;
    const all = this.series;
    this.series = {};
    data.series.forEach((name, i) => {
      this.series[name] = all.subarray(i * this.numFrames, (i + 1) * this.numFrames);
    });
    this.keys = [];
    const words = new Uint32Array(this.numBlocks);
    for (let frame = 0; frame < this.numFrames; frame++) {
      this.apply(words, frame);
      if (frame % KEY_EVERY === 0) this.keys.push(words.slice());
    }
  }

  apply(words, frame) {
    for (let i = this.change_start[frame]; i < this.change_start[frame + 1]; i++)
      words[this.change_block[i]] = this.change_word[i];
  }

  wordsAt(frame) {
    const key = Math.floor(frame / KEY_EVERY);
    const words = this.keys[key].slice();
    for (let f = key * KEY_EVERY + 1; f <= frame; f++) this.apply(words, f);
    return words;
  }

  eventsAt(frame) {
    const found = [];
    for (let i = this.event_start[frame]; i < this.event_start[frame + 1]; i++)
      found.push([this.events[i] >>> 28, this.events[i] & 0xfffffff]);
    return found;
  }
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
