// The traces of every plot, from the grid and what is chosen. Knows nothing of controls, tables or themes' names:
// colours are read from the style sheet.
"use strict";

const GIB = 1024 ** 3;
const DASHES = ["solid", "dash", "dashdot", "longdash", "longdashdot"];
const MARKERS = ["circle", "square", "diamond", "triangle-up", "x", "star", "triangle-down", "cross"];
const SERIES = 8; // colours in the style sheet

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const series = (index) => color(`series-${index % SERIES}`);

// ---- axes -----------------------------------------------------------------------------------------------------------

// Ticks of a log axis at every step-th power of two between two values.
function powerTicks(low, high, step, text) {
  const tickvals = [];
  for (let power = Math.floor(Math.log2(low) / step) * step; power <= Math.log2(high) + 1e-9; power += step) {
    tickvals.push(2 ** power);
  }
  return { tickmode: "array", tickvals, ticktext: tickvals.map(text) };
}

function logRange(low, high) {
  const pad = Math.max(0.02 * Math.log10(high / low), 0.05);
  return [Math.log10(low) - pad, Math.log10(high) + pad];
}

function contextAxis(view) {
  const { contexts } = view.grid;
  const [low, high] = [contexts[0], contexts[contexts.length - 1]];
  return { ...powerTicks(low, high, view.narrow ? 2 : 1, words.tokens), range: logRange(low, high) };
}

function usersAxis(view) {
  const { users } = view.grid;
  const high = users[users.length - 1];
  return { ...powerTicks(1, high, view.narrow ? 3 : 2, (value) => words.count(value)), range: logRange(1, high) };
}

function bytesAxis(low, high) {
  const step = [2, 3, 5, 10].find((one) => Math.log2(high / low) / one <= 8) || 10;
  return { ...powerTicks(low, high, step, bytesTick), range: logRange(low, high) };
}

const bytesTick = (value) => words.bytes(value).replace(/\.0+ /, " ");

// Ticks of a log axis at powers of ten; at some of their multiples where they are few.
function decadeTicks(low, high) {
  const decades = Math.log10(high / low);
  const steps = decades < 1 ? [1, 1.5, 2, 3, 5, 7] : decades < 2 ? [1, 2, 5] : [1];
  const tickvals = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    tickvals.push(...steps.map((step) => step * 10 ** power));
  }
  const text = (value) => (value < 10 ? String(Number(value.toPrecision(2))) : words.count(value));
  return { tickmode: "array", tickvals, ticktext: tickvals.map(text), range: logRange(low, high) };
}

const upright = (x, name) => ({
  type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: color("muted"), width: 1, dash: "dot" }, name,
});

const atTop = (x, text, more = {}) => ({
  xref: "x", yref: "paper", x: Math.log10(x), y: 1, yanchor: "bottom", text, showarrow: false, font: { size: 12, color: color("muted") }, ...more,
});

function emptyNote(text) {
  return { xref: "paper", yref: "paper", x: 0.5, y: 0.5, text, showarrow: false, bgcolor: color("card"), borderpad: 6, font: { size: 15, color: color("warn") } };
}

// A curve in two strokes: dotted where ``beyond`` says so. Both share one entry of the legend.
function twoStrokes(points, beyond, trace) {
  const first = points.findIndex((_, index) => beyond(index));
  const cut = first < 0 ? points.length : first;
  const stroke = (part, more) => ({
    x: part.map((point) => point.x),
    y: part.map((point) => point.y),
    text: part.map((point) => point.text),
    hovertemplate: "%{text}<extra></extra>",
    mode: "lines+markers",
    legendgroup: trace.name,
    ...trace,
    ...more,
    line: { width: 2, ...trace.line, ...(more.line || {}) },
    marker: { size: 6, color: trace.line.color, ...trace.marker, ...(more.marker || {}) },
  });
  const strokes = [];
  if (cut > 0) strokes.push(stroke(points.slice(0, cut), {}));
  if (cut < points.length) {
    const rest = points.slice(Math.max(0, cut - 1));
    strokes.push(stroke(rest, { line: { dash: "dot" }, marker: { opacity: 0 }, showlegend: cut === 0 && trace.showlegend !== false }));
  }
  return strokes;
}

// ---- the plots ------------------------------------------------------------------------------------------------------

const plots = {
  growth(view) {
    const { grid, users, c, device, share } = view;
    const lines = grid.models.flatMap((model, index) => {
      const bytes = model.shares[view.n].caches[view.f].device_bytes;
      const points = grid.contexts.map((context, at) => ({
        x: context,
        y: users * bytes[at] || null,
        text:
          `<b>${words.plain(words.short(model.name))}</b><br>${words.count(context)} tokens, ${words.users(users)}<br>` +
          `${words.exactBytes(users * bytes[at])} on each device` +
          (view.beyond(model, at) ? "<br>more than the model can read" : ""),
      }));
      return twoStrokes(points, (at) => view.beyond(model, at), {
        name: words.plain(words.short(model.name)),
        line: { color: series(index), width: index === view.m ? 3 : 2 },
        marker: { symbol: MARKERS[index % MARKERS.length] },
      });
    });
    const ends = [grid.contexts[0], grid.contexts[grid.contexts.length - 1]];
    const level = (bytes, name, dash, ink) => ({
      x: ends, y: [bytes, bytes], mode: "lines", name, line: { color: color(ink), width: 1.5, dash },
      hovertemplate: `${name}<br>${words.exactBytes(bytes)}<br>${words.decimalBytes(bytes)}<extra></extra>`,
    });
    const levels = [
      level(share.weights_bytes, "weights", "dash", "ink"),
      level(device.memory_bytes, "memory of a device", "dashdot", "muted"),
    ];
    if (view.memory > 0) levels.push(level(view.memory, "left for caches", "dot", "warn"));
    const all = [...lines, ...levels].flatMap((trace) => trace.y).filter((value) => value > 0);
    return {
      traces: [...levels, ...lines],
      layout: {
        xaxis: contextAxis(view),
        yaxis: bytesAxis(Math.min(...all), Math.max(...all)),
        shapes: [upright(grid.contexts[c])],
      },
    };
  },

  memory(view) {
    const { grid, model, share, device, c, users } = view;
    const kept = Math.min(device.memory_bytes, device.memory_bytes - device.usable_bytes);
    const rows = grid.formats.map((format, f) => {
      const cache = share.caches[f];
      const parts = model.kinds.map((_, kind) => cache.by_kind[kind][c] * users);
      const held = share.weights_bytes + parts.reduce((sum, bytes) => sum + bytes, 0);
      return { format, parts, held, free: Math.max(0, device.usable_bytes - held) };
    });
    const isShort = (row) => row.held > device.usable_bytes;
    const end = ((rows.some(isShort) ? 1.45 : 1.04) * device.memory_bytes) / GIB;
    const bar = (name, values, ink, more = {}) => ({
      type: "bar", orientation: "h", name, y: rows.map((row) => row.format), x: values.map((bytes) => bytes / GIB),
      text: values.map((bytes) => `${name}: ${words.exactBytes(bytes)}`), textposition: "none",
      hovertemplate: "%{y}<br>%{text}<extra></extra>",
      marker: { color: ink, line: { color: color("card"), width: 1 }, ...more },
    });
    const traces = [
      bar("kept for the runtime", rows.map(() => kept), color("kept"), { pattern: { shape: "/", size: 5, solidity: 0.25, fgcolor: color("muted") } }),
      bar("weights", rows.map(() => share.weights_bytes), color("weights")),
      ...model.kinds.map((kind, at) => bar(`cache: ${kind}`, rows.map((row) => row.parts[at]), series(at))),
      bar("free", rows.map((row) => row.free), color("free"), { line: { color: color("muted"), width: 1 } }),
    ];
    const over = rows.filter(isShort).map((row) => ({
      xref: "paper", x: 1, xanchor: "right", y: row.format, showarrow: false, bgcolor: color("card"), borderpad: 3,
      text: `short by ${words.bytes(row.held - device.usable_bytes)}`, font: { color: color("warn"), size: 12 },
    }));
    return {
      traces,
      layout: {
        xaxis: { range: [0, end] },
        yaxis: { tickmode: "array", tickvals: grid.formats, ticktext: grid.formats.map((name, f) => (f === view.f ? `<b>▸ ${name}</b>` : name)) },
        shapes: [{ ...upright(device.memory_bytes / GIB), line: { color: color("ink"), width: 2 } }],
        annotations: over,
      },
    };
  },

  fit(view) {
    const { grid, share, model, c } = view;
    const traces = grid.formats.flatMap((format, f) => {
      const points = grid.contexts.map((context, at) => {
        const users = formulas.usersThatFit(view.device, share, share.caches[f].device_bytes[at]);
        return {
          x: context,
          y: users || null, // a log axis has no zero
          text: `<b>${format}</b><br>${words.count(context)} tokens<br>${words.users(users || 0)}, ${words.bytes(share.caches[f].device_bytes[at])} each on a device`,
        };
      });
      return twoStrokes(points, (at) => view.beyond(model, at), {
        name: format,
        line: { color: series(f), width: f === view.f ? 4 : 2 },
        marker: { symbol: MARKERS[f % MARKERS.length] },
      });
    });
    const all = traces.flatMap((trace) => trace.y).filter((value) => value > 0);
    return {
      traces,
      layout: {
        xaxis: contextAxis(view),
        yaxis: decadeTicks(Math.min(1, ...all), Math.max(10, ...all)),
        shapes: [upright(grid.contexts[c])],
        annotations: all.length ? [] : [emptyNote(view.fits === null ? "the cache holds nothing: it bounds no number of users" : view.noneFit())],
      },
    };
  },

  speed(view) {
    const { grid, share, cache, device, c, fits } = view;
    const steps = grid.users.map((_, u) => formulas.step(grid, share, cache, device, c, u));
    if (!steps[0]) return { traces: [], layout: { annotations: [emptyNote("the bandwidth of this device is not known")] } };
    const tooMany = (u) => fits !== null && grid.users[u] > fits;
    const knee = steps.findIndex((step) => step.limit === "compute");
    const traces = [["perUser", "y", "per user", 0], ["total", "y2", "all users", 1]].flatMap(([key, yaxis, name, ink]) => {
      const points = steps.map((step, u) => ({
        x: grid.users[u],
        y: step[key],
        text:
          `<b>${words.users(grid.users[u])}</b>${tooMany(u) ? " (do not fit)" : ""}<br>${words.count(step.perUser, 2)} tokens/s per user<br>` +
          `${words.count(step.total, 1)} tokens/s in all<br>step ${words.seconds(step.seconds)}, bound by ${step.limit}`,
      }));
      const strokes = twoStrokes(points, tooMany, { name, yaxis, showlegend: false, line: { color: series(ink) }, marker: { symbol: MARKERS[ink] } });
      if (knee < 0) return strokes;
      const mark = {
        x: [grid.users[knee]], y: [steps[knee][key]], yaxis, mode: "markers", showlegend: false, name: "knee", cliponaxis: false,
        text: [`from ${words.users(grid.users[knee])} on, arithmetic is the limit`], hovertemplate: "%{text}<extra></extra>",
        marker: { symbol: "diamond-open", size: 15, color: color("ink"), line: { width: 2 } },
      };
      return [...strokes, mark];
    });
    const last = grid.users[grid.users.length - 1];
    const shown = fits !== null && fits >= 1 && fits <= last;
    const side = fits * fits > last ? "right" : "left"; // the half of a log axis it lies in
    const range = (key) => [Math.min(...steps.map((step) => step[key])), Math.max(...steps.map((step) => step[key]))];
    return {
      traces,
      layout: {
        xaxis: usersAxis(view),
        yaxis: decadeTicks(...range("perUser")),
        yaxis2: decadeTicks(...range("total")),
        shapes: [upright(view.users), ...(shown ? [{ ...upright(fits), line: { color: color("warn"), width: 2, dash: "dash" } }] : [])],
        annotations: shown ? [atTop(fits, `memory full: ${words.users(fits)}`, { xanchor: side, font: { size: 12, color: color("warn") } })] : [],
      },
    };
  },

  step(view) {
    const { grid, share, cache, device, c, fits } = view;
    const chosen = grid.users.map((_, u) => u).filter((u) => {
      const count = grid.users[u];
      return (fits === null || count <= fits) && (Number.isInteger(Math.log2(count)) || u === view.u);
    });
    const steps = chosen.map((u) => formulas.step(grid, share, cache, device, c, u));
    if (!steps[0]) {
      return { traces: [], layout: { annotations: [emptyNote(device.bandwidth_bytes_per_s ? view.noneFit() : "the bandwidth of this device is not known")] } };
    }
    const x = chosen.map((u) => words.count(grid.users[u]));
    const part = (name, key, ink) => ({
      x, y: steps.map((step) => step[key] * 1e3), name, hovertemplate: `${name}: %{y:,.3f} ms<extra></extra>`,
      type: "bar", marker: { color: color(ink), line: { color: color("card"), width: 1 } },
    });
    const traces = [part("reading weights", "weightsSeconds", "weights"), part("reading caches", "cacheSeconds", "series-0")];
    if (device.bf16_flops) {
      traces.push({
        ...part("arithmetic", "computeSeconds", "ink"), type: "scatter", mode: "lines+markers",
        line: { color: color("series-1"), width: 2 }, marker: { symbol: "diamond", size: 8, color: color("series-1") },
      });
    }
    return { traces, layout: { xaxis: { unifiedhovertitle: { text: "<b>users: %{x}</b>" } } } };
  },

  ladder(view) {
    const { model, c, grid } = view;
    const designs = model.formats[view.f].ladder;
    const published = designs[0][c];
    const rows = model.designs.flatMap((name, at) => (designs[at] ? [{ name, bytes: designs[at][c], ink: at ? "series-1" : "series-0" }] : []));
    for (const [name, bytes] of Object.entries(model.format_ladder)) {
      rows.push({ name: `in ${name}`, bytes: bytes[c], ink: "series-2" });
    }
    const most = Math.max(...rows.map((row) => row.bytes)) || GIB;
    const ratio = (row) => (published ? ` · ${words.count(row.bytes / published, 2)}×` : "");
    return {
      traces: [{
        type: "bar", orientation: "h", y: rows.map((row) => row.name), x: rows.map((row) => row.bytes / GIB),
        marker: { color: rows.map((row) => color(row.ink)) }, showlegend: false,
        text: rows.map((row) => words.bytes(row.bytes) + ratio(row)), textposition: "outside", cliponaxis: false,
        textfont: { color: color("ink") },
        customdata: rows.map((row) => words.exactBytes(row.bytes)),
        hovertemplate: `%{y}<br>${words.count(grid.contexts[c])} tokens<br>%{customdata}<extra></extra>`,
      }],
      layout: { xaxis: { range: [0, ((view.narrow ? 1.9 : 1.45) * most) / GIB] } },
    };
  },
};

// ---- drawing --------------------------------------------------------------------------------------------------------

function drawPlot(plot, view) {
  const { traces, layout } = plots[plot.key](view);
  const axis = (name) => {
    if (!plot.layout[name] && !layout[name]) return undefined;
    const own = { ...plot.layout[name], ...layout[name] };
    return {
      gridcolor: color("grid"), linecolor: color("muted"), zerolinecolor: color("grid"), automargin: true, fixedrange: view.narrow,
      ...own, title: { ...own.title, font: { size: 13, color: color("muted") }, standoff: 8 },
    };
  };
  const axes = Object.fromEntries(["xaxis", "yaxis", "yaxis2"].map((name) => [name, axis(name)]).filter(([, value]) => value));
  const whole = {
    ...plot.layout,
    ...layout,
    ...axes,
    height: plot.height + (view.narrow ? 40 : 0),
    autosize: !view.width,
    width: view.width,
    margin: { l: 8, r: 12, t: 30, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: color("ink") },
    legend: { orientation: "h", x: 0, xanchor: "left", y: -75 / (plot.height - 130), yanchor: "top", font: { size: 12 }, itemwidth: 30, traceorder: "normal" },
    hoverlabel: {
      bgcolor: color("card"), bordercolor: color("muted"), font: { family: getComputedStyle(document.body).fontFamily, color: color("ink"), size: 13 }, align: "left", namelength: -1,
    },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("muted"), activecolor: color("ink") },
    bargap: 0.25,
  };
  const config = {
    displaylogo: false, responsive: true, displayModeBar: view.narrow ? false : "hover", doubleClick: "reset",
    modeBarButtons: [["toImage", "resetScale2d"]],
    toImageButtonOptions: { format: "png", scale: 2, filename: `kvfolio-${plot.key}` },
  };
  return Plotly.react(document.getElementById(`plot-${plot.key}`), traces, whole, config);
}
