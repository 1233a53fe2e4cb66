"use strict";
// Draws the page from the data in it. Text of models is only ever set as text, never as HTML.

const run = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#4269d0", "#e3a008", "#ff725c", "#3fb5a3", "#9c6ade", "#3ca951", "#f07fae", "#7f9fe8", "#9c6b4e", "#8b919c"];
const charts = [];
let isSmooth = true;

// -- small tools -----------------------------------------------------------------------------------

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 10000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size >= 100) return value.toFixed(0);
  if (size === 0 || size >= 0.001) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
}

function duration(seconds) {
  if (seconds === null) return "";
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// -- head ------------------------------------------------------------------------------------------

function drawHead() {
  const { word, num_done, num_steps, elapsed_s } = run.status;
  const words = { finished: "finished", failed: "ended with an error", unfinished: "running, or stopped early" };
  document.title = `${run.name} · hybridrl`;
  const model = run.settings.all.find(([key]) => key === "model.path");
  const named = model && model[1] !== "null" ? model[1] : "the starter model";
  document.getElementById("head").append(
    el("div", { class: "title" },
      el("h1", {}, run.name),
      el("span", { class: `chip ${word}` }, words[word]),
      el("span", { class: "space" }),
      el("button", { id: "smooth", class: "on", title: "draw a running mean over the noisy values", onclick: toggleSmooth }, "smooth"),
      el("button", { title: "light or dark", onclick: toggleTheme }, "light / dark")),
    el("p", { class: "sub" }, `Step ${num_done} of ${num_steps}, ${duration(elapsed_s) || "just begun"} · trains ${named} · page made ${run.made}`),
    el("div", { class: "tiles" }, run.tiles.map((tile) =>
      el("div", { class: "card tile" },
        el("div", { class: "name" }, tile.label),
        el("div", { class: "value" }, number(tile.last), " ", el("small", {}, tile.unit)),
        el("div", { class: "from" }, `at first ${number(tile.first)}`)))),
    el("nav", { id: "nav" }));
}

function section(title) {
  const id = title.toLowerCase().replace(/[^a-z]+/g, "-");
  document.getElementById("nav").append(el("a", { href: `#${id}` }, title));
  const box = el("section", { id }, el("h2", {}, title));
  document.getElementById("main").append(box);
  return box;
}

// -- findings --------------------------------------------------------------------------------------

function drawFindings() {
  if (!run.panels.length) document.getElementById("main").append(el("p", { class: "none" }, "No step has been recorded yet."));
  const box = section("What stands out");
  if (!run.findings.length) box.append(el("p", { class: "none" }, "None of the rules had anything to say."));
  for (const finding of run.findings) {
    const tries = finding.remedies.flatMap((text, at) => [at ? " or " : "Try ", el("code", {}, text)]);
    box.append(el("div", { class: `card finding ${finding.severity}` },
      el("h3", {}, finding.title),
      el("p", {}, finding.text),
      finding.quote ? el("pre", {}, finding.quote) : null,
      tries.length ? el("div", { class: "try" }, tries) : null));
  }
}

// -- plots -----------------------------------------------------------------------------------------

function drawSection(title) {
  const panels = run.panels.filter((panel) => panel.section === title);
  const moving = panels.filter((panel) => !panel.constants);
  const constant = panels.filter((panel) => panel.constants);
  if (!panels.length) return null;
  const box = section(title);
  const grid = el("div", { class: "grid" }, moving.map(plotCard));
  const still = constant.length ? el("p", { class: "still" }, "The same in every step: ", constant.flatMap(stillOf)) : null;
  const isRest = title === "Everything else";
  box.append(...(isRest ? [el("details", {}, el("summary", {}, "Metrics without a plot above"), grid, still || "")] : [grid, still || ""]));
  return box;
}

function stillOf(panel, at) {
  const shown = panel.lines.map((line, index) => (panel.lines.length > 1 ? `${line.label} ` : "") + number(panel.constants[index])).join(", ") + (panel.unit && panel.lines.length === 1 ? ` ${panel.unit}` : "");
  return [at ? " · " : "", el("span", { title: panel.lines.map((line) => `${line.name}: ${line.meaning}`).join("\n") }, `${panel.title} `, el("b", {}, shown))];
}

function plotCard(panel) {
  const chart = el("div", { class: "chart" });
  const told = panel.lines.filter((line) => line.meaning);
  const seen = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    charts.push([chart, panel]);
    draw(chart, panel);
  }, { rootMargin: "400px" });
  seen.observe(chart);
  return el("div", { class: "card plot" },
    el("div", { class: "head" }, el("h3", {}, panel.title), el("span", { class: "unit" }, panel.unit + (panel.log ? " (log scale)" : ""))),
    el("p", { class: "about" }, panel.about || (told.length ? sentence(told[0].meaning) : "")),
    chart,
    told.length > 1 ? el("details", {}, el("summary", {}, "what the lines mean"),
      el("ul", {}, told.map((line) => el("li", {}, el("b", {}, line.label), ` – ${line.meaning} (`, el("code", {}, line.name), ")")))) : null);
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + ".";
}

function draw(chart, panel) {
  const traces = [];
  if (panel.band) traces.push(...bandOf(panel.band));
  panel.lines.forEach((line, at) => traces.push(...(panel.kind === "stack" ? [areaOf(line, at)] : lineOf(line, at, panel))));
  Plotly.react(chart, traces, layoutOf(panel, traces), { displayModeBar: false, responsive: true });
}

function lineOf(line, at, panel) {
  const color = COLORS[at % COLORS.length];
  const isEval = line.name.startsWith("eval/");
  const base = { x: line.x, y: line.y, name: line.label, legendgroup: line.name, hovertemplate: "%{y:.4~g}" };
  const few = line.x.length < 40;
  if (isEval && line.x.length < 100) return [{ ...base, mode: "lines+markers", line: { color, width: 2 }, marker: { size: few ? 7 : 4 } }];
  if (few || !isSmooth) return [{ ...base, mode: line.x.length < 2 ? "markers" : "lines", line: { color, width: 1.8 } }];
  return [
    { ...base, mode: "lines", line: { color, width: 1 }, opacity: document.documentElement.dataset.theme === "dark" ? 0.45 : 0.28, showlegend: false },
    { ...base, y: smoothed(line.y, panel.log), mode: "lines", line: { color, width: 2.2 }, hoverinfo: "skip", hovertemplate: null, showlegend: panel.lines.length > 1 },
  ];
}

function areaOf(line, at) {
  const color = COLORS[at % COLORS.length];
  return { x: line.x, y: line.y, name: line.label, stackgroup: "all", mode: "lines", line: { width: 0.6, color }, fillcolor: color + "b0", hovertemplate: "%{y:.3~g} s" };
}

function bandOf(band) {
  const edge = { mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
  return [
    { ...edge, x: band.low.x, y: band.low.y, showlegend: false },
    { ...edge, x: band.high.x, y: band.high.y, name: band.label, fill: "tonexty", fillcolor: css("--grid") },
  ];
}

// The mean of the values around each, over a twenty-fifth of the run; null stays null.
function smoothed(values, isLog) {
  const reach = Math.max(2, Math.round(values.length / 50));
  return values.map((value, at) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, at - reach), at + reach + 1).filter((one) => one !== null);
    const mean = near.reduce((sum, one) => sum + (isLog ? Math.log(one) : one), 0) / near.length;
    return isLog ? Math.exp(mean) : mean;
  });
}

function layoutOf(panel, traces) {
  const ink = css("--soft"), grid = css("--grid");
  const axis = { gridcolor: grid, zeroline: false, linecolor: grid, automargin: true, tickfont: { size: 12 } };
  const layout = {
    font: { family: "system-ui, sans-serif", size: 12, color: ink },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 46, r: 10, t: 10, b: 36 }, hovermode: "x unified",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 } },
    xaxis: { ...axis, title: { text: "step", standoff: 4, font: { size: 12, color: css("--faint") } }, showgrid: false },
    yaxis: { ...axis, type: panel.log ? "log" : "linear", rangemode: panel.kind === "stack" ? "tozero" : "normal", exponentformat: "SI", nticks: 6, ...(panel.log ? { dtick: decades(traces) } : {}) },
    showlegend: traces.filter((trace) => trace.showlegend !== false).length > 1,
    legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 } },
    shapes: [], annotations: [],
  };
  if (panel.limit && isNear(panel)) {
    const at = panel.log ? Math.log10(panel.limit.value) : panel.limit.value;
    layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: panel.limit.value, y1: panel.limit.value, line: { color: css("--faint"), width: 1, dash: "dash" } });
    layout.annotations.push({ xref: "paper", x: 1, xanchor: "right", y: at, yanchor: "bottom", text: `${panel.limit.label} = ${panel.limit.value}`, showarrow: false, font: { size: 11, color: css("--faint") } });
  }
  return layout;
}

// Whole powers of ten where the values span several, else Plotly's choice.
function decades(traces) {
  const values = traces.flatMap((trace) => trace.y).filter((value) => value > 0);
  const span = Math.log10(values.reduce((a, b) => Math.max(a, b)) / values.reduce((a, b) => Math.min(a, b)));
  return span > 2 ? Math.ceil(span / 5) : undefined;
}

function isNear(panel) {
  const values = panel.lines.flatMap((line) => line.y).concat(panel.band ? panel.band.high.y : []).filter((value) => value !== null);
  const top = values.reduce((a, b) => Math.max(a, b), 0);
  return top > panel.limit.value / 4 && (panel.log || top < panel.limit.value * 20);
}

function redraw() {
  for (const [chart, panel] of charts) draw(chart, panel);
}

function toggleSmooth() {
  isSmooth = !isSmooth;
  document.getElementById("smooth").classList.toggle("on", isSmooth);
  redraw();
}

function toggleTheme() {
  setTheme(document.documentElement.dataset.theme !== "dark");
  redraw();
}

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}

// -- one step --------------------------------------------------------------------------------------

function drawTimeline() {
  const { rows, step, duration_ms } = run.timeline;
  if (rows.length) {
    const box = section("One step as it happened");
    const colors = new Map();
    const card = el("div", { class: "card" },
      el("p", { class: "answer" }, `Step ${step}, from the trace of driver and ranks. Point at a bar for its name, time and bytes; open trace.json in ui.perfetto.dev for every step.`));
    for (const row of rows) card.append(lane(row, duration_ms, colors));
    card.append(el("div", { class: "scale" }, [0, 0.25, 0.5, 0.75, 1].map((part) => el("span", {}, `${number(part * duration_ms)} ms`))));
    box.append(card);
  }
}

function drawMemory() {
  const { memory } = run.timeline;
  const plots = drawSection("Memory");
  if (!memory.length) return;
  const calls = [...new Set(memory.flatMap((one) => Object.keys(one.calls)))];
  const most = Math.max(...memory.flatMap((one) => Object.values(one.calls)));
  const cell = (mib) => el("td", { class: "num" }, mib === undefined ? "" : el("div", { class: "meter", style: `--part:${(100 * mib) / most}%` }, `${number(mib)} MiB`));
  (plots || section("Memory")).append(el("div", { class: "card", style: "margin-top:16px" },
    el("h3", {}, "Host memory of each rank"), el("p", { class: "answer" }, "Resident memory of the process after each call, the largest of the last steps."),
    el("table", {},
      el("tr", {}, el("th", {}, "rank"), calls.map((call) => el("th", {}, `after ${call}`))),
      memory.map((one) => el("tr", {}, el("td", {}, one.rank), calls.map((call) => cell(one.calls[call])))))));
}

function lane(row, total, colors) {
  const depth = row.spans.reduce((most, span) => Math.max(most, span.depth), 0) + 1;
  const bars = row.spans.map((span) => {
    if (!colors.has(span.name)) colors.set(span.name, COLORS[colors.size % COLORS.length]);
    const width = (100 * span.ms) / total;
    const extra = Object.entries(span.args).map(([key, value]) => `\n${key} = ${typeof value === "number" ? value.toLocaleString("en") : value}`).join("");
    return el("div", { class: "bar", title: `${span.name}: ${number(span.ms)} ms, from ${number(span.begin_ms)} ms${extra}`,
      style: `left:${(100 * span.begin_ms) / total}%;width:max(1px,${width}%);top:${span.depth * 22}px;background:${colors.get(span.name)}b0;padding:${width > 4 ? "0 5px" : "0"}` },
      width > 4 ? span.name : "");
  });
  return el("div", { class: "lane" }, el("div", { class: "who" }, row.name), el("div", { class: "bars", style: `height:${depth * 22}px` }, bars));
}

// -- samples ---------------------------------------------------------------------------------------

function drawSamples() {
  const { steps, stories } = run.samples;
  if (!steps.length && !stories.length) return;
  const box = section("What the model writes");
  const longest = Math.max(...[...steps, ...stories].flatMap((group) => group.samples.map((sample) => sample.response.length)));
  const shown = el("div", { class: longest < 60 ? "grid" : "stack" });
  const controls = el("div", { class: "controls" });
  const legend = el("span", { class: "key" }, "sure", el("i", {}), "unsure: a token of low probability stands out; point at it for its log-prob");
  const choose = el("select", { onchange: () => show(choose.value) });
  if (stories.length) choose.append(el("option", { value: "stories" }, "the same held-out prompts over time"));
  for (const group of [...steps].reverse()) choose.append(el("option", { value: group.step }, `training, step ${group.step}`));
  controls.append(choose, legend);
  box.append(controls, shown);
  function show(what) {
    const groups = what === "stories"
      ? stories.map((story) => sampleCard(story.prompt, story.samples, true))
      : steps.find((group) => String(group.step) === what).samples.map((sample) => sampleCard(sample.prompt, [sample], false));
    shown.replaceChildren(...groups);
  }
  show(choose.value);
}

function sampleCard(prompt, samples, hasSteps) {
  return el("div", { class: "card" },
    el("div", { class: "prompt mono" }, prompt),
    samples[0].answer ? el("div", { class: "answer" }, "answer: ", el("span", { class: "mono" }, samples[0].answer)) : null,
    el("table", {},
      el("tr", {}, hasSteps ? el("th", {}, "step") : null, el("th", {}, "response"), el("th", {}, "reward")),
      samples.map((sample) => el("tr", {},
        hasSteps ? el("td", { class: "num" }, String(sample.step)) : null,
        el("td", { class: "response mono", style: "width:100%" }, tokensOf(sample), sample.is_truncated ? el("span", { class: "cut" }, " cut at the limit") : null),
        el("td", { class: "reward" }, number(sample.reward))))));
}

function tokensOf(sample) {
  if (!sample.tokens || !sample.tokens.length) return sample.response;
  const tokens = sample.tokens.map((text, at) => {
    const logprob = sample.logprobs[at];
    const unsure = 1 - Math.exp(logprob);
    return el("span", { class: /^<[^ ]+>$/.test(text) ? "token special" : "token", style: `background:rgba(var(--token), ${(0.85 * unsure).toFixed(3)})`,
      title: `log-prob ${logprob} nats, probability ${(100 * Math.exp(logprob)).toFixed(1)} %` }, text);
  });
  const rest = sample.tokens.length >= 512 ? [" … "] : [];
  return [...tokens, ...rest];
}

// -- configuration and log -------------------------------------------------------------------------

function drawSettings() {
  const box = section("Configuration");
  const { changes, all } = run.settings;
  const card = el("div", { class: "card" });
  if (changes.length) {
    card.append(el("h3", {}, "What differs from the defaults"), el("table", {},
      el("tr", {}, el("th", {}, "key"), el("th", {}, "this run"), el("th", {}, "default")),
      changes.map(([key, old, now]) => el("tr", {}, el("td", { class: "mono" }, key), el("td", { class: "mono" }, now), el("td", { class: "mono none" }, old)))));
  } else card.append(el("p", { class: "none" }, "Everything is at its default."));
  card.append(el("details", { style: "margin-top:12px" }, el("summary", {}, `all ${all.length} keys`),
    el("table", {}, all.map(([key, value]) => el("tr", {}, el("td", { class: "mono" }, key), el("td", { class: "mono" }, value))))));
  box.append(card);
  if (run.log.length) {
    section("Log").append(el("div", { class: "card" }, el("details", {}, el("summary", {}, `last ${run.log.length} lines of log.txt`), el("pre", {}, run.log.join("\n")))));
  }
}

// Later changes of the system's choice are followed until a person chooses here.
const system = matchMedia("(prefers-color-scheme: dark)");
setTheme(system.matches);
system.addEventListener("change", () => { setTheme(system.matches); redraw(); });
document.getElementById("main").replaceChildren();
drawHead();
drawFindings();
drawSection("Learning");
drawSamples();
drawSection("Policy");
drawSection("Responses");
drawSection("Time");
drawTimeline();
drawMemory();
drawSection("Everything else");
drawSettings();
document.getElementById("foot").append(`Made by hybridrl ${run.version}. One file, no network. Plots: Plotly.js.`);
