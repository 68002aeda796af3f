// Renders what report/page.py has put into the element `content`. All text goes in as text: nothing here reads HTML.
"use strict";
const content = JSON.parse(document.getElementById("content").textContent);
const root = document.documentElement, page = document.getElementById("page");
const token = new URLSearchParams(location.search).get("token");
const SVG_SIZE = { width: 900, height: 540 }, GROUPS_AT_ONCE = 6, POLL_MS = 2000;

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

const number = (value, digits = 3) => (value === null || value === undefined ? "–" : Number(value).toFixed(digits));
// A half goes to the even digit, as in the words that Python wrote: 56.25 is 56.2 everywhere.
const PERCENT = new Intl.NumberFormat("en", { style: "percent", minimumFractionDigits: 1, maximumFractionDigits: 1, roundingMode: "halfEven" });
const percent = (value) => (value === null || value === undefined ? "–" : PERCENT.format(value));
const signed = (value) => (value > 0 ? "+" : "") + number(value, 2);
function short(value) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (value >= size) return +(value / size).toPrecision(3) + unit;
  return String(value);
}
function clock(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const hours = Math.floor(seconds / 3600), minutes = Math.floor((seconds % 3600) / 60);
  if (seconds >= 86400) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return minutes ? `${minutes} min ${String(Math.round(seconds % 60)).padStart(2, "0")} s` : `${Math.round(seconds)} s`;
}

// --- figures

const drawn = new Map(); // element -> figure, of the figures that are on the page
const colour = (role) => getComputedStyle(root).getPropertyValue("--" + role.slice(1)).trim() || role;

function coloured(value, key) {
  if (Array.isArray(value)) return value;
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, k)]));
  return typeof value === "string" && /color$/.test(key) && value[0] === "$" ? colour(value) : value;
}

function themed({ layout, traces }, narrow) {
  const axis = { gridcolor: colour("$grid"), linecolor: colour("$line"), zerolinecolor: colour("$muted"), zeroline: false, automargin: true,
    tickfont: { size: 12 }, title: { font: { size: 12.5 }, standoff: 8 } };
  const made = { ...layout, paper_bgcolor: colour("$card"), plot_bgcolor: colour("$card"), hovermode: "closest",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("$soft") },
    margin: { l: 48, r: 10, t: 8, b: 40 }, bargap: 0.25, colorway: [colour("$agent0")],
    legend: { orientation: "h", x: 0, y: 1.03, yanchor: "bottom", traceorder: "normal", font: { size: narrow ? 11 : 12 }, itemwidth: 30 },
    hoverlabel: { bgcolor: colour("$paper"), bordercolor: colour("$line"), font: { color: colour("$ink"), size: 12.5 }, align: "left" } };
  for (const name of ["xaxis", "yaxis", "yaxis2"]) {
    if (name === "yaxis2" && !layout.yaxis2) continue;
    const own = layout[name] || {};
    made[name] = { ...axis, ...own, title: { ...axis.title, ...(own.title || {}) } };
  }
  made.xaxis.showgrid = false;
  const places = traces.flatMap((trace) => trace.x);
  if (!made.xaxis.type && places.every(Number.isInteger) && Math.max(...places) - Math.min(...places) <= 12) made.xaxis.dtick = 1;
  return made;
}

function draw(place) {
  const figure = drawn.get(place);
  if (!figure) return; // the reader went on to another page
  place.dataset.drawn = figure.name;
  const style = (trace) => (trace.error_y ? { ...trace, error_y: { color: colour("$muted"), ...trace.error_y } } : trace);
  const traces = figure.traces.map((trace) => style(coloured(trace, "")));
  return Plotly.react(place, traces, themed(figure, place.clientWidth < 420), { displayModeBar: false, responsive: true });
}

// The library takes a browser longer to read than all the rest. As a blob it is read beside the page, whose words are there
// meanwhile; figures are drawn as the reader comes near them, one at a time, so that the first is there at once.
let turn = new Promise((resolve) => {
  const text = document.getElementById("library");
  const address = text ? URL.createObjectURL(new Blob([text.textContent], { type: "text/javascript" })) : "plotly.js";
  document.head.append(el("script", { src: address, onload: resolve }));
});
const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) {
    nearby.unobserve(entry.target);
    turn = turn.then(() => new Promise((done) => setTimeout(() => { try { draw(entry.target); } finally { done(); } })));
  }
}, { rootMargin: "250px" });

function figureCard(figure) {
  const place = el("div", { class: "plot", role: "img", "aria-label": `${figure.title}. ${figure.read}` });
  drawn.set(place, figure);
  const button = (label, save) => el("button", { title: `download ${label}`, onclick: save }, label);
  const image = (format) => async () =>
    save(`${figure.name}.${format}`, await Plotly.toImage(place, { format, ...SVG_SIZE, scale: format === "png" ? 2 : 1 }));
  return el("figure", { class: "card", id: "figure-" + figure.name },
    el("figcaption", {}, el("h3", {}, figure.title), el("p", { class: "read" }, figure.read)), place,
    el("div", { class: "tools" }, button("SVG", image("svg")), button("PNG", image("png")),
      button("CSV", () => save(`${figure.name}.csv`, URL.createObjectURL(new Blob([csv(figure)], { type: "text/csv" }))))));
}

function save(name, address) {
  el("a", { href: address, download: name }).click();
}

function csv(figure) {
  const title = (axis) => (figure.layout[axis] && figure.layout[axis].title && figure.layout[axis].title.text) || axis;
  const text = (value) => String(value).replaceAll("<br>", "; ").replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
  // a spreadsheet runs a cell that begins like a formula
  const cell = (value) => (value === null || value === undefined ? "" : typeof value === "number" ? String(value)
    : `"${text(value).replace(/^(?=[=+\-@\t\r])/, "'").replaceAll('"', '""')}"`);
  const lines = [["series", title("xaxis"), "quantity", "value", "error", "note"].map(cell).join(",")];
  for (const trace of figure.traces) {
    const quantity = title(trace.yaxis === "y2" ? "yaxis2" : "yaxis"), error = trace.error_y || trace.error_x;
    trace.x.forEach((x, i) => lines.push(
      [trace.name, x, quantity, trace.y[i], error ? error.array[i] : null, trace.text ? trace.text[i] : null].map(cell).join(",")));
  }
  return lines.join("\n") + "\n";
}

function sections(found, place) {
  for (const section of found) {
    const figures = section.figures.filter((figure) => figure.traces), missing = section.figures.filter((figure) => figure.missing);
    place.append(el("section", { id: anchor(section.title) }, el("h2", {}, section.title),
      el("div", { class: "figures" }, figures.map(figureCard)),
      missing.length ? el("ul", { class: "missing" }, missing.map((figure) =>
        el("li", { id: "figure-" + figure.name }, el("b", {}, figure.title), " ", figure.missing))) : ""));
  }
  for (const plot of place.querySelectorAll(".plot")) nearby.observe(plot);
}

const anchor = (title) => title.toLowerCase().replace(/[^a-z]+/g, "-").replace(/^-|-$/g, "");

// --- one run

const tileBox = (tile) => el("div", { class: "tile" }, el("div", { class: "label" }, tile.label), el("div", { class: "value" }, tile.value),
  el("div", { class: "note" }, tile.note));
const words = (found) => el("div", { class: "words" }, found.map((text) => el("p", {}, text)));

function runHead(run) {
  return [el("p", { class: "headline" }, run.headline), el("div", { class: "tiles" }, run.tiles.map(tileBox)), words(run.words)];
}

function runPage(run, place) {
  const head = el("div", { class: "head" }, runHead(run)), body = el("div");
  const links = [...run.sections.map((section) => section.title), "Transcripts", "All updates"];
  const jump = (title) => el("a", { href: "#", onclick: (event) => {
    event.preventDefault();
    const target = body.querySelector("#" + anchor(title));
    if (target.open === false) target.open = true;
    target.scrollIntoView();
  } }, title);
  place.append(head, el("nav", { class: "contents" }, links.map(jump)), body);
  sections(run.sections, body);
  body.append(transcripts(run), updateTable(run),
    el("details", { id: "recipe" }, el("summary", {}, "Recipe"), el("pre", {}, run.recipe)));
  return { head, body };
}

function updateTable(run) {
  const heads = ["stage", "agent", "decision", "why", "reward", "KL bound", "delta", "step", "gain"];
  const box = el("details", { id: "all-updates" }, el("summary", {}, `All ${run.updates.length} updates`));
  box.addEventListener("toggle", () => {
    if (!box.open || box.querySelector("table")) return;
    const body = el("tbody", {}, run.updates.map(([stage, agent, decision, why, ...values]) => el("tr", {},
      el("td", {}, String(stage)), el("td", {}, agent), el("td", {}, el("span", { class: "mark " + decision }), decision),
      el("td", { class: "wide" }, why), values.map((value, i) => el("td", { class: "number" }, number(value, i === 3 ? 2 : 4))))));
    const head = heads.map((name, i) => el("th", { class: i > 3 ? "number" : null }, name));
    box.append(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head)), body)));
  });
  return box;
}

// --- transcripts

const SHADES = [["probability", "probability when written"], ["change", "change by the update"], ["none", "nothing"]];
const LEGENDS = {
  probability: "The stronger the shade, the less likely the token was when its agent wrote it. Point at a token for the number.",
  change: "Blue tokens became likelier by the accepted update, orange ones less likely; only messages of the updated agent (underlined) that judged it are measured.",
  none: "What the other agents and the task read.",
};

function transcripts(run) {
  const box = el("section", { id: "transcripts", class: "transcripts" }, el("h2", {}, "Transcripts"));
  const files = run.transcripts.files;
  if (!files.length) {
    box.append(el("p", { class: "legend" }, "None were written yet; diagnostics.save_episodes=all writes every episode of every update."));
    return box;
  }
  const options = (values) => values.map(([value, label]) => el("option", { value }, label));
  const choice = (name, label, values) => el("label", {}, label, el("select", { name, onchange: show }, options(values)));
  const agents = [...new Set(files.map((file) => file.agent))];
  const stages = [...new Set(files.map((file) => file.stage))];
  const filters = el("div", { class: "filters" },
    choice("stage", "stage", stages.map((stage) => [String(stage), String(stage)])),
    choice("agent", "agent updated", [["", "any"], ...agents.map((agent) => [agent, agent])]),
    choice("reward", "reward", [["", "any"], ["differs", "differs in the group"], ["right", "some right"], ["wrong", "none right"]]),
    el("label", {}, "item", el("input", { name: "item", type: "search", placeholder: "id or question", oninput: show })),
    choice("shade", "shade tokens by", SHADES));
  const legend = el("p", { class: "legend" }), list = el("div");
  const field = (name) => filters.querySelector(`[name=${name}]`);
  field("stage").value = String(stages[stages.length - 1]);
  let limit = GROUPS_AT_ONCE, turn = 0;

  async function show(event) {
    const mine = ++turn;
    if (event) limit = GROUPS_AT_ONCE;
    const wanted = files.filter((file) => String(file.stage) === field("stage").value && (!field("agent").value || file.agent === field("agent").value));
    const found = [];
    for (const file of wanted) found.push(...(await groupsOf(run, file)).map((group) => ({ group, file })));
    if (mine !== turn) return; // another choice was made meanwhile
    const needle = field("item").value.toLowerCase();
    const chosen = found.filter(({ group }) => fits(group, field("reward").value)
      && (!needle || `${group.item} ${group.prompt}`.toLowerCase().includes(needle)));
    legend.textContent = LEGENDS[field("shade").value];
    list.replaceChildren(...chosen.slice(0, limit).map(({ group, file }) => groupBox(group, file, field("shade").value)));
    if (chosen.length > limit) list.append(el("button", { onclick: () => { limit += 2 * GROUPS_AT_ONCE; show(); } }, `show more of ${chosen.length} groups`));
    if (!chosen.length) list.append(el("p", { class: "legend" }, "No group of episodes fits these filters."));
  }

  const note = content.mode === "report" && run.transcripts.updates > files.length
    ? ` This file has transcripts of ${files.length} of ${run.transcripts.updates} updates; teamtr-lora view shows all.` : "";
  box.append(filters, legend, list, note ? el("p", { class: "legend" }, note) : "");
  new IntersectionObserver((entries, observer) => {
    if (entries.some((entry) => entry.isIntersecting)) { observer.disconnect(); show(); }
  }, { rootMargin: "800px" }).observe(box);
  return box;
}

async function groupsOf(run, file) {
  if (!file.groups) file.groups = (await ask("transcripts", { name: run.name, file: file.name })).groups;
  return file.groups;
}

function fits(group, reward) {
  const rewards = group.episodes.map((episode) => episode.reward || 0);
  const best = Math.max(...rewards), worst = Math.min(...rewards);
  if (reward === "differs") return best > worst;
  if (reward === "right") return group.episodes.some((episode) => episode.success);
  return reward === "wrong" ? group.episodes.every((episode) => !episode.success) : true;
}

function groupBox(group, file, shade) {
  const right = group.episodes.filter((episode) => episode.success).length;
  return el("article", { class: "group" },
    el("header", {}, el("div", { class: "prompt" }, group.prompt || ""),
      el("div", { class: "item" }, `${group.item} · stage ${file.stage}, before ${file.agent}'s update · ${right} of ${group.episodes.length} right`)),
    el("div", { class: "episodes", tabindex: "0" }, group.episodes.map((episode) => episodeBox(episode, file, shade))));
}

function episodeBox(episode, file, shade) {
  const advantage = episode.advantage === undefined ? "" : `advantage ${signed(episode.advantage)}`;
  return el("div", { class: "episode" },
    el("header", {}, el("span", {}, el("span", { class: "mark " + (episode.success ? "accepted" : "rejected") }),
      el("b", {}, `reward ${+number(episode.reward, 3)}`), episode.rank ? `  ${episode.rank}` : ""), el("span", {}, advantage)),
    episode.messages.map((message, place) => messageBox(message, place, episode, file, shade)));
}

// A reward for the whole episode is the last message's in a transcript; where the team answers with another one, it is that one's.
function rewardOf(place, episode) {
  const rewards = episode.messages.map((message) => message.reward), last = rewards.length - 1, answer = episode.answer_turn;
  if (answer !== null && answer !== undefined && answer < last && rewards.slice(0, last).every((reward) => !reward))
    [rewards[answer], rewards[last]] = [rewards[last], rewards[answer]];
  return rewards[place];
}

function messageBox(message, place, episode, file, shade) {
  const cut = message.finish === "length" ? "cut off" : "", updated = message.agent === file.agent, reward = rewardOf(place, episode);
  const advantage = updated && episode.advantage !== undefined ? `advantage ${signed(episode.advantage)}` : "";
  return el("div", { class: "message" + (updated ? " updated" : "") },
    el("div", { class: "who" }, el("b", {}, message.agent), el("span", {}, message.version), el("span", {}, `${message.tokens} tokens`),
      place === episode.answer_turn && place < episode.messages.length - 1 ? el("span", {}, "the team's answer") : "",
      el("span", {}, cut || message.finish), reward === undefined ? "" : el("span", {}, `reward ${+number(reward, 3)}`),
      advantage ? el("span", {}, advantage) : ""),
    el("div", { class: "text" }, tokens(message, shade)),
    message.feedback ? el("div", { class: "feedback" }, message.feedback) : "");
}

function tokens(message, shade) {
  if (!message.pieces || shade === "none") return message.text;
  return message.pieces.map((piece, i) => {
    const p = Math.exp(message.logprobs[i]), change = message.change ? message.change[i] : null;
    const said = `probability ${p.toFixed(3)}` + (change === null ? "" : `, after the update ${Math.min(1, p * Math.exp(change)).toFixed(3)}`);
    const made = el("span", { title: said, class: message.text.includes(piece) ? null : "special" }, piece);
    const strength = shade === "probability" ? 0.75 * (1 - p) : change === null ? 0 : 0.75 * Math.tanh(4 * Math.abs(change));
    if (strength > 0.02) made.style.background = `rgba(${getComputedStyle(root).getPropertyValue(shade === "change" && change > 0 ? "--more" : "--less")}, ${strength.toFixed(2)})`;
    return made;
  });
}

// --- the server behind `view`

async function ask(what, parameters) {
  const pairs = Object.entries(parameters || {}).flatMap(([key, values]) => [].concat(values).map((value) => [key, value]));
  const answer = await fetch(`api/${what}?${new URLSearchParams(pairs)}`, token ? { headers: { "X-Token": token } } : {});
  const data = await answer.json();
  if (data.error) throw new Error(data.error);
  return data;
}

const COLUMNS = ["", "run", "state", "stage", "before", "now", "accepted", "shrunk", "rejected", "skipped", "tokens", "time", "time left"];

function runsTable(runs, picked) {
  const heads = COLUMNS.map((name, i) => el("th", { class: i > 2 ? "number" : null }, name));
  const row = (run) => {
    const c = run.counts, cell = (text) => el("td", { class: "number" }, text);
    const pick = el("input", { type: "checkbox", "aria-label": `compare ${run.name}`, onclick: (event) => event.stopPropagation(),
      onchange: (event) => picked[event.target.checked ? "add" : "delete"](run.name) });
    pick.checked = picked.has(run.name);
    return el("tr", { class: "link", "data-run": run.name, onclick: () => { location.hash = new URLSearchParams({ run: run.name }); } },
      el("td", {}, pick), el("td", {}, el("a", { href: "#" + new URLSearchParams({ run: run.name }) }, run.name)),
      el("td", { title: run.problem || null }, el("span", { class: "mark " + run.state }), run.state),
      cell(`${run.stage} of ${run.stages}`), cell(percent(run.accuracy_before)), cell(percent(run.accuracy_now)),
      cell(String(c.accepted - c.shrunk)), cell(String(c.shrunk)), cell(String(c.rejected)), cell(String(c.skipped)), cell(short(run.sampled_tokens)),
      cell(clock(run.seconds)), cell(clock(run.seconds_left)));
  };
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, runs.map(row))));
}

async function listPage() {
  const picked = new Set(), place = el("div"), note = el("p", { class: "legend" });
  const compare = el("button", { onclick: () => { if (picked.size > 1) location.hash = new URLSearchParams([...picked].map((name) => ["compare", name])); } },
    "compare the runs picked");
  page.replaceChildren(el("h1", {}, "teamtr-lora"), el("p", { class: "headline" }, "Runs"), place, el("p", {}, compare), note);
  let last = "";
  await follow(async () => {
    const { folder, runs } = await ask("runs");
    note.textContent = runs.length ? `${runs.length} in ${folder}, newest first.` : `No runs in ${folder} yet.`;
    const text = JSON.stringify(runs);
    if (text !== last) place.replaceChildren(runsTable(runs, picked));
    last = text;
  });
}

async function livePage(name) {
  const home = el("h1", {}, el("a", { href: "#" }, "runs"), " / ", name), place = el("div"), status = el("p", { class: "status" });
  page.replaceChildren(home, status, place);
  let rows = -1, parts = null;
  await follow(async () => {
    const { run, state } = await ask("run", { name, rows });
    const more = state.problem || (state.seconds_left === null ? "" : `${clock(state.seconds_left)} left`);
    status.replaceChildren(el("span", { class: "mark " + state.state }), state.state + (more ? ", " + more : ""));
    if (!run) return;
    rows = run.rows;
    if (!parts) { parts = runPage(run, place); return; }
    refresh(run, parts);
  });
}

function refresh(run, { head, body }) {
  head.replaceChildren(...runHead(run));
  for (const figure of run.sections.flatMap((section) => section.figures)) {
    const old = body.querySelector("#figure-" + figure.name), plot = old && old.querySelector(".plot");
    if (figure.traces && plot) {
      drawn.set(plot, figure);
      if (plot.dataset.drawn) draw(plot);
    } else if (figure.traces && old) { // the first rows that it can be drawn from have come
      const card = figureCard(figure);
      old.closest("section").querySelector(".figures").append(card);
      old.remove();
      nearby.observe(card.querySelector(".plot"));
    }
  }
  const old = body.querySelector("#all-updates"), table = updateTable(run);
  old.replaceWith(table);
  table.open = old.open;
  const shown = body.querySelector("#transcripts");
  if (!shown.contains(document.activeElement)) { // a reader at work in the transcripts is not disturbed
    const open = shown.querySelector(".group") && shown.getBoundingClientRect().bottom > 0 && shown.getBoundingClientRect().top < innerHeight;
    if (!open) shown.replaceWith(transcripts(run));
  }
}

let visit = 0;
async function follow(look) {
  const mine = visit;
  while (mine === visit) {
    try {
      if (!document.hidden) await look();
      page.querySelector(".problem")?.remove();
    } catch (error) {
      if (mine === visit && !page.querySelector(".problem")) page.prepend(el("p", { class: "problem" }, `${error.message} (trying again)`));
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

function route() {
  visit += 1;
  for (const place of drawn.keys()) if (place.dataset.drawn) Plotly.purge(place);
  drawn.clear();
  const words = new URLSearchParams(location.hash.slice(1));
  if (words.get("run")) return livePage(words.get("run"));
  if (words.getAll("compare").length) {
    page.replaceChildren(el("h1", {}, el("a", { href: "#" }, "runs"), " / compared"));
    let shown = false;
    return follow(async () => {
      if (shown) return;
      const found = await ask("compare", { name: words.getAll("compare") });
      comparedPage(found.comparison, found.runs);
      shown = true;
    });
  }
  return listPage();
}

// --- a report

function comparedPage(comparison, runs) {
  page.append(el("p", { class: "headline" }, comparison.headline), words(comparison.words));
  const body = el("div");
  page.append(body);
  sections(comparison.sections, body);
  const place = el("div");
  const choice = el("select", { onchange: () => one() }, runs.map((run, i) => el("option", { value: i }, run.name)));
  page.append(el("h2", {}, "Each run"), el("div", { class: "filters" }, el("label", {}, "run", choice)), place);
  function one() {
    place.replaceChildren();
    runPage(runs[choice.value], place);
  }
  one();
}

function reportPage() {
  const names = content.runs.map((run) => run.name).join(", ");
  page.append(el("h1", {}, names));
  if (content.comparison) comparedPage(content.comparison, content.runs);
  else runPage(content.runs[0], page);
  page.append(el("p", { class: "footer" }, "Made by teamtr-lora report from the run's own files."));
}

const redraw = () => { for (const place of drawn.keys()) if (place.isConnected && place.dataset.drawn) draw(place); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("beforeprint", () => {
  root.classList.add("print");
  for (const place of drawn.keys()) if (place.isConnected && window.Plotly) draw(place);
});
addEventListener("afterprint", () => { root.classList.remove("print"); redraw(); });
if (content.mode === "report") reportPage();
else { addEventListener("hashchange", route); route(); }
