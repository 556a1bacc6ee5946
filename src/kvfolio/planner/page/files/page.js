// Controls, tiles, tables and themes: what is chosen becomes a view, a view becomes numbers and plots.
"use strict";

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const grid = read("grid");
const frame = read("frame"); // plots with their words and axes; what the command has beside the controls
const one = (id) => document.getElementById(id);
const chosen = { model: 0, ...grid.chosen };
const CONTROLS = ["model", "context", "users", "format", "device", "count"];

// ---- the view: everything that follows from what is chosen -----------------------------------------------------------

const beyond = (model, c) => model.max_context !== null && grid.contexts[c] > model.max_context;

function makeView() {
  const model = grid.models[chosen.model];
  return {
    ...viewOf(model),
    m: chosen.model, c: chosen.context, u: chosen.users, f: chosen.format, n: chosen.count,
    context: grid.contexts[chosen.context], users: grid.users[chosen.users], format: grid.formats[chosen.format],
    narrow: window.innerWidth < 700, beyond,
  };
}

function viewOf(model) {
  const device = grid.devices[chosen.device];
  const share = model.shares[chosen.count];
  const cache = share.caches[chosen.format];
  const memory = formulas.cacheMemory(device, share);
  const numDevices = grid.counts[chosen.count];
  const shortBytes = Math.max(0, share.weights_bytes - device.usable_bytes);
  return {
    grid, model, device, share, cache, memory, numDevices, shortBytes,
    devices: `${numDevices} × ${device.name}`,
    oneDevice: numDevices === 1 ? `one ${device.name}` : `one of ${numDevices} × ${device.name}`,
    fits: formulas.usersThatFit(device, share, cache.device_bytes[chosen.context]),
    step: formulas.step(grid, share, cache, device, chosen.context, chosen.users),
    noneFit: () => (shortBytes ? `the weights do not fit: each device lacks ${words.bytes(shortBytes)}` : "not even one conversation fits"),
  };
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

function tile(key, value, detail, warning) {
  const box = one(`tile-${key}`);
  box.querySelector(".value").textContent = value;
  box.querySelector(".detail").textContent = detail;
  box.classList.toggle("warning", Boolean(warning));
}

function showTiles(view) {
  const { model, step, fits } = view;
  const format = model.formats[view.f];
  const growth = format.bytes_per_token;
  tile("token", growth ? words.bytes(growth) : "none", `${words.count(growth, Number.isInteger(growth) ? 0 : 2)} B a token` +
    (format.bytes_fixed ? `, and ${words.bytes(format.bytes_fixed)} that do not grow` : ""));
  const tooLong = beyond(model, view.c);
  const at = format.bytes_at[view.c];
  tile("conversation", words.bytes(at), tooLong ? `${words.tokens(view.context)} tokens: the model reads ${words.tokens(model.max_context)} at most`
    : `${words.count(at)} B at ${words.tokens(view.context)} tokens`, tooLong);
  const none = fits === 0 || view.shortBytes > 0;
  tile("fit", fits === null ? "no bound" : words.count(fits), none ? view.noneFit() :
    `with ${words.bytes(view.memory)} for caches on each of ${view.devices}`, none);
  const tooMany = fits !== null && view.users > fits;
  const unknown = "the bandwidth of this device is not known";
  const verdict = tooMany ? `${words.users(view.users)} ${view.users === 1 ? "does" : "do"} not fit` : step ? `step ${words.seconds(step.seconds)}, bound by ${step.limit}` : unknown;
  tile("user-speed", step ? words.rate(step.perUser) : "–", verdict, tooMany || !step);
  tile("total-speed", step ? words.rate(step.total) : "–", step ? `${words.users(view.users)} at ${words.tokens(view.context)} tokens, at best` : unknown, tooMany || !step);
  const even = format.break_even[view.u];
  tile("break-even", even === null ? "never" : words.count(even),
    `${even === null ? "" : "tokens: "}${view.users === 1 ? "the cache of 1 user" : `caches of ${words.users(view.users)}`} against ${words.bytes(model.weights_bytes)} of weights`);
}

// ---- tables ---------------------------------------------------------------------------------------------------------

function fillTable(id, heads, rows) {
  const make = (name, text, scope) => {
    const cell = document.createElement(name);
    cell.textContent = text;
    if (scope) cell.scope = scope;
    return cell;
  };
  const head = document.createElement("tr");
  head.append(...heads.map((text) => make("th", text, "col")));
  const body = rows.map(({ cells, mark }) => {
    const row = document.createElement("tr");
    if (mark) row.className = mark;
    row.append(make("th", cells[0], "row"), ...cells.slice(1).map((text) => make("td", text)));
    return row;
  });
  one(id).querySelector("thead").replaceChildren(head);
  one(id).querySelector("tbody").replaceChildren(...body);
}

const speedCells = (step) => (step ? [words.rate(step.perUser), words.rate(step.total), step.limit] : ["–", "–", "not known"]);
const fitsText = (fits) => (fits === null ? "no bound" : words.count(fits));

function showTables(view) {
  const { model, share, cache, device } = view;
  const format = model.formats[view.f];
  const rows = grid.contexts.map((context, c) => {
    const first = formulas.firstToken(share, device, c);
    const cells = [
      words.count(context) + (beyond(model, c) ? " *" : ""), words.bytes(format.bytes_at[c]), words.bytes(cache.device_bytes[c]),
      fitsText(formulas.usersThatFit(device, share, cache.device_bytes[c])),
      ...speedCells(formulas.step(grid, share, cache, device, c, view.u)), first === null ? "–" : words.seconds(first),
    ];
    return { cells, mark: [c === view.c ? "current" : "", beyond(model, c) ? "beyond" : ""].join(" ").trim() };
  });
  fillTable("table-contexts", ["context (tokens)", "one conversation", "its part on a device", "users that fit",
    "tokens/s per user", "tokens/s, all", "limit", "first token after"], rows);
  const models = grid.models.map((other, index) => {
    const its = viewOf(other);
    const itsFormat = other.formats[view.f];
    return {
      cells: [
        other.name, words.params(other.num_parameters), words.params(other.num_active_parameters),
        words.bytes(other.weights_bytes), words.bytes(itsFormat.bytes_per_token), words.bytes(itsFormat.bytes_at[view.c]) + (beyond(other, view.c) ? " *" : ""),
        ...(its.shortBytes ? ["weights do not fit", "–", "–", "–"] : [fitsText(its.fits), ...speedCells(its.step)]),
      ],
      mark: index === view.m ? "current" : "",
    };
  });
  fillTable("table-models", ["model", "parameters", "active", "weights", "bytes a token", "one conversation", "users that fit",
    "tokens/s per user", "tokens/s, all", "limit"], models);
}

// ---- everything else that follows -----------------------------------------------------------------------------------

function showWords(view) {
  const filled = {
    model: view.model.name, format: view.format, devices: view.devices, one_device: view.oneDevice, users: words.users(view.users), context: words.count(view.context),
  };
  for (const plot of frame.plots) {
    one(`caption-${plot.key}`).textContent = plot.caption.replace(/\{(\w+)\}/g, (_, word) => filled[word]);
  }
  for (const spot of document.querySelectorAll("[data-word]")) spot.textContent = filled[spot.dataset.word];
  const command = [
    "kvfolio plan", frame.sources[view.m], `--context ${view.context}`, `--users ${view.users}`, view.device.arguments,
    `--devices ${grid.counts[chosen.count]}`, `--kv-format ${view.format}`, frame.arguments,
  ];
  one("command").textContent = command.filter(Boolean).join(" ");
  for (const facts of document.querySelectorAll("[data-model]")) facts.hidden = Number(facts.dataset.model) !== view.m;
}

function showControls(view) {
  for (const name of CONTROLS) one(name).value = String(chosen[name]);
  const context = `${words.tokens(view.context)} tokens`;
  one("context-value").textContent = context;
  one("context").setAttribute("aria-valuetext", context);
  one("users-value").textContent = words.count(view.users);
  one("users").setAttribute("aria-valuetext", words.users(view.users));
  const limit = view.model.max_context;
  const last = grid.contexts.length - 1;
  const reach = limit === null ? last : grid.contexts.filter((stop) => stop <= limit).length - 1;
  one("reach").style.setProperty("--reach", `${(100 * Math.max(0, reach)) / last}%`);
  one("reach-text").textContent = limit === null ? "the model names no longest context" : `the model reads up to ${words.tokens(limit)}`;
}

let view = null;

function show() {
  view = makeView();
  showControls(view);
  showTiles(view);
  showWords(view);
  showTables(view);
  draw();
  remember(view);
}

// Draws the plots; resolves when all stand.
function draw(more = {}) {
  document.documentElement.dataset.drawn = "";
  return Promise.all(frame.plots.map((plot) => drawPlot(plot, { ...view, ...more }))).then((drawn) => {
    const hasPoints = (trace) => trace.y.some((y, at) => y !== null && trace.x[at] !== null);
    document.documentElement.dataset.drawn = drawn.filter((plot) => plot.data.some(hasPoints)).length;
  });
}

// ---- what was chosen, in the address: a page can be linked to as it stands -------------------------------------------

function remember(view) {
  const address = new URLSearchParams({
    model: chosen.model, context: view.context, users: view.users, format: view.format, device: view.device.name,
    devices: grid.counts[chosen.count],
  });
  if (one("theme").value !== "system") address.set("theme", one("theme").value);
  try {
    history.replaceState(null, "", `#${address}`);
  } catch {
    // some browsers refuse this for files; the page works without it
  }
}

function recall() {
  const address = new URLSearchParams(location.hash.slice(1));
  const lists = {
    model: grid.models.map((_, index) => index), context: grid.contexts, users: grid.users, format: grid.formats,
    device: grid.devices.map((device) => device.name), devices: grid.counts,
  };
  for (const [key, list] of Object.entries(lists)) {
    const index = list.map(String).indexOf(address.get(key));
    if (index >= 0) chosen[key === "devices" ? "count" : key] = index;
  }
  if (["light", "dark"].includes(address.get("theme"))) one("theme").value = address.get("theme");
}

function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

// ---- start ----------------------------------------------------------------------------------------------------------

function fillMenu(id, labels) {
  one(id).replaceChildren(...labels.map((label, index) => new Option(label, String(index))));
}

function start() {
  fillMenu("model", grid.models.map((model) => model.name));
  fillMenu("format", grid.formats);
  fillMenu("device", grid.devices.map((device) => `${device.name} · ${words.bytes(device.memory_bytes).replace(/\.0+ /, " ")}`));
  fillMenu("count", grid.counts.map(String));
  one("context").max = grid.contexts.length - 1;
  one("users").max = grid.users.length - 1;
  recall();
  setTheme(one("theme").value);
  let waiting = false;
  const soon = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      show();
    });
  };
  for (const name of CONTROLS) {
    one(name).addEventListener("input", (event) => {
      chosen[name] = Number(event.target.value);
      soon();
    });
  }
  one("theme").addEventListener("input", (event) => {
    setTheme(event.target.value);
    soon();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
  window.addEventListener("resize", () => {
    if (view && view.narrow !== window.innerWidth < 700) soon();
  });
  // On paper: light, and as wide as a sheet.
  window.addEventListener("beforeprint", () => {
    setTheme("light");
    draw({ width: 680 });
  });
  window.addEventListener("afterprint", () => {
    setTheme(one("theme").value);
    draw();
  });
  show();
}

start();
