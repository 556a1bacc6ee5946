// Numbers as people read them. Knows nothing of models or of the page.
"use strict";

const words = {
  count(value, digits = 0) {
    return value.toLocaleString("en-US", { maximumFractionDigits: digits, minimumFractionDigits: digits });
  },

  // Three figures or so: 0.52, 3.4, 87, 12,345.
  rate(value) {
    return words.count(value, value < 1 ? 2 : value < 100 ? 1 : 0);
  },

  // 4K, 1.5K, 128K, 1M; a number that is no such step stays as it is.
  tokens(count) {
    for (const [factor, letter] of [[1048576, "M"], [1024, "K"]]) {
      const value = count / factor;
      if (value >= 1 && Number.isInteger(value * 10)) return words.count(value, Number.isInteger(value) ? 0 : 1) + letter;
    }
    return words.count(count);
  },

  // Parameters: 134.52 M, 8.03 B, as the command line has them.
  params(value) {
    let step = 0;
    while (value >= 999.995 && step < 4) {
      value /= 1000;
      step += 1;
    }
    return step ? `${words.count(value, 2)} ${"KMBT"[step - 1]}` : words.count(value);
  },

  users(count) {
    return words.count(count) + (count === 1 ? " user" : " users");
  },

  bytes(value) {
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < 5) {
      value /= 1024;
      unit += 1;
    }
    const digits = unit === 0 ? (Number.isInteger(value) ? 0 : 1) : value < 100 ? 2 : 1;
    return `${words.count(value, digits)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
  },

  // As vendors write: powers of 1000.
  decimalBytes(value) {
    let unit = 0;
    while (Math.abs(value) >= 1000 && unit < 5) {
      value /= 1000;
      unit += 1;
    }
    return `${words.count(value, unit ? 1 : 0)} ${["B", "KB", "MB", "GB", "TB", "PB"][unit]}`;
  },

  exactBytes(value) {
    return `${words.bytes(value)} (${words.count(value, Number.isInteger(value) ? 0 : 2)} B)`;
  },

  seconds(value) {
    if (value < 1e-3) return `${words.count(value * 1e6)} µs`;
    if (value < 1) return `${words.count(value * 1e3, value < 0.1 ? 2 : 1)} ms`;
    if (value < 120) return `${words.count(value, 2)} s`;
    return value < 7200 ? `${words.count(value / 60, 1)} min` : `${words.count(value / 3600, 1)} h`;
  },

  // Text for plotly, which reads a few tags in what it is given.
  plain(text) {
    return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  },

  // A name that must fit beside a plot.
  short(text, most = 28) {
    return text.length <= most ? text : text.slice(0, most - 1) + "…";
  },
};

if (typeof module !== "undefined") module.exports = words;
