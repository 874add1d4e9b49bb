"use strict";
// The page of one fleet. State comes by server-sent events: `whole` once, then `changed`. One frame draws what changed.
// All texts are foreign: they are set as text, never as markup.

const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const STATES = [["up", "up"], ["launching", "launching"], ["draining", "leaving"], ["stopped", "stopped"], ["silent", "not connected"]];
const CAUSES = {death: "loss", failure: "loss", failed: "loss", notice: "notice", drain: "notice", join: "join"};
const MARKS = [["loss", "a loss"], ["notice", "a notice or a drain"], ["join", "a join"], ["other", "another change"]];
const RANGES = [["10 min", 600], ["1 h", 3600], ["6 h", 21600], ["all", 0]];
const ENDED = ["succeeded", "failed", "cancelled"];
const WAITING = ["queued", "starting", "recovering"];
const MOST_EVENTS = 200, MOST_LOG = 300_000, MOST_POINTS = 1500, MOST_SHOWN_MARKS = 80, BINS = 160, MOST_PAST = 100;

const fleet = {now: 0, got: 0, fleet: {}, hosts: new Map(), jobs: new Map(), workers: new Map(), series: new Map(), events: []};
const view = {range: 3600, find: "", chosen: "", shown: [], dirty: new Set(), first: -1, act: ""};

// ---- words

const two = n => String(n).padStart(2, "0");
const clock = at => { const d = new Date(at * 1000); return `${two(d.getUTCHours())}:${two(d.getUTCMinutes())}:${two(d.getUTCSeconds())}`; };
const minute = at => clock(at).slice(0, 5);
const day = at => new Date(at * 1000).toISOString().slice(0, 10);
function span(s) {
    s = Math.max(0, Math.round(s));
    for (const [unit, size, small, below] of [["d", 86400, 3600, "h"], ["h", 3600, 60, "m"], ["m", 60, 1, "s"]])
        if (s >= size) return `${Math.floor(s / size)}${unit}${two(Math.floor(s % size / small))}${below}`;
    return `${s}s`;
}
function money(micros, digits) {
    const dollars = micros / 1e6;
    return "$" + dollars.toLocaleString("en-US", {minimumFractionDigits: digits ?? (dollars < 1 ? 4 : 2), maximumFractionDigits: digits ?? (dollars < 1 ? 4 : 2)});
}
const count = (n, noun) => `${n.toLocaleString("en-US")} ${noun}${n === 1 ? "" : "s"}`;
const short = x => x >= 1e6 ? +(x / 1e6).toPrecision(3) + "M" : x >= 1e4 ? +(x / 1e3).toPrecision(3) + "k" : String(+x.toPrecision(3));
const seconds = s => s < 0.0995 ? `${(s * 1e3).toPrecision(3)} ms` : s < 10 ? `${s.toPrecision(3)} s` : span(s);
const now = () => fleet.now + (performance.now() - fleet.got) / 1000;  // the dispatcher's clock, not the browser's

// ---- elements

function el(tag, of = {}, ...children) {
    const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
    for (const [name, value] of Object.entries(of)) {
        if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
        else if (value === true) node.setAttribute(name, "");
        else if (value !== false && value != null) node.setAttribute(name, value);
    }
    node.append(...children.filter(c => c != null));
    return node;
}
const s = (tag, of, ...children) => el("svg:" + tag, of, ...children);
function put(node, ...children) { node.replaceChildren(...children.filter(c => c != null)); return node; }
function text(node, value) { if (node.textContent !== value) node.textContent = value; return node; }

// ---- what comes

function take(news, whole) {
    if (whole) for (const kept of [fleet.hosts, fleet.jobs, fleet.workers, fleet.series]) kept.clear();
    fleet.now = news.now; fleet.got = performance.now(); fleet.fleet = news.fleet;
    for (const name of news.gone) { fleet.hosts.delete(name); fleet.jobs.delete(name); fleet.series.delete(name); view.dirty.add("zones"); }
    for (const [name, host] of Object.entries(news.hosts)) { fleet.hosts.set(name, host); view.dirty.add("zones"); }
    for (const [name, job] of Object.entries(news.jobs)) { fleet.jobs.set(name, job); view.dirty.add("past"); }
    for (const [name, of] of Object.entries(news.workers)) fleet.workers.set(name, of);
    for (const [name, of] of Object.entries(news.series)) merge(name, of);
    if (whole) { fleet.events = []; put($("event-list")); }
    fleet.events.push(...news.events);
    fleet.events = fleet.events.slice(-MOST_EVENTS);
    addEvents(news.events.slice(-MOST_EVENTS));
    for (const part of ["head", "jobs"]) view.dirty.add(part);
    draw();
}
function merge(name, of) {
    const kept = fleet.series.get(name) ?? {points: [], marks: [], forgotten: 0};
    const last = kept.points.at(-1)?.[0] ?? -Infinity;
    kept.points.push(...of.points.filter(p => p[0] > last));
    if (kept.points.length > MOST_POINTS) kept.points = kept.points.filter((_, i, all) => i % 2 === 0 || i === all.length - 1);
    for (const mark of of.marks) {
        const at = kept.marks.findIndex(m => m.generation === mark.generation && m.cause === mark.cause);
        if (at < 0) kept.marks.push(mark); else kept.marks[at] = mark;
    }
    kept.forgotten = of.forgotten;
    fleet.series.set(name, kept);
}
let drawing = false;
function draw() {
    if (drawing) return;
    drawing = true;
    requestAnimationFrame(() => {
        drawing = false;
        const dirty = view.dirty;
        view.dirty = new Set();
        if (dirty.has("head")) drawHead();
        if (dirty.has("jobs")) drawJobs();
        if (dirty.has("past")) drawPast();
        if (dirty.has("zones")) { drawZones(); filter(); drawHost(); }
    });
}

// ---- head

const nameOf = state => STATES.find(x => x[0] === state)?.[1] ?? state;
const stateOf = h => h.state === "up" && h.why.startsWith("its agent is not connected") ? "silent" : h.state;
const workerHosts = () => [...fleet.hosts.values()].filter(h => h.role === "worker");
function drawHead() {
    const f = fleet.fleet, workers = workerHosts(), up = workers.filter(h => stateOf(h) === "up").length;
    document.title = `${f.fleet}: ${f.state}`;
    text($("name"), f.fleet); text($("state"), f.state); text($("why"), f.why);
    $("state").className = "badge " + (f.state === "up" ? "good" : f.state === "down" ? "" : "wait");
    const tiles = [["Hosts up", `${up} of ${f.wanted ?? f.target}`, `from ${f.min} to ${f.max}, ${count(workers.length, "host")} in all`],
        ["Burn", money(f.burn_micros_h) + "/h", f.on_demand_burn_micros_h ? `on demand ${money(f.on_demand_burn_micros_h)}/h` : ""],
        ["Spent", f.spent_micros == null ? "…" : money(f.spent_micros), f.policy?.max_micros ? `of ${money(f.policy.max_micros, 2)}` : `in ${span(now() - f.since)}`]];
    if (f.spent_micros && f.on_demand_spent_micros) {
        const saved = f.on_demand_spent_micros - f.spent_micros;
        tiles.push(["Savings", `${Math.round(100 * saved / f.on_demand_spent_micros)} %`, saved >= 0 ? `${money(saved)} less than on demand` : `${money(-saved)} more than on demand`]);
    } else tiles.push(["Savings", "…", "no price on demand is known"]);
    if (f.until != null) tiles.push(["Ends in", span(f.until - now()), "by max_lifetime"]);
    put($("tiles"), ...tiles.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, note)))));
    drawWaits(workers);
    text($("foot"), `As of ${day(fleet.now)} ${clock(fleet.now)} UTC${f.past_jobs ? `; ${count(f.past_jobs, "older job")} not shown` : ""}.`);
}
function drawWaits(workers) {
    const lines = [];
    for (const j of fleet.jobs.values()) if (WAITING.includes(j.state) && j.why) lines.push([j.job, `${j.state}: ${j.why}`]);
    const groups = new Map();
    for (const h of workers) if (h.why && stateOf(h) !== "stopped") {
        const key = `${nameOf(stateOf(h))}: ${h.why.replace(/\d+(\.\d+)?( s\b|%)/g, "…$2")}`;
        if (!groups.has(key)) groups.set(key, []);
        groups.get(key).push(h.host);
    }
    for (const [why, hosts] of [...groups].sort((a, b) => b[1].length - a[1].length).slice(0, 8))
        lines.push([hosts.length === 1 ? hosts[0] : count(hosts.length, "host"), why]);
    if (groups.size > 8) lines.push([`${groups.size - 8} more reasons`, "see the list of hosts"]);
    if (fleet.fleet.policy?.why) lines.push([`policy ${fleet.fleet.policy.rule}`, fleet.fleet.policy.why]);
    put($("waits"), ...lines.map(([who, why]) => el("li", {}, el("b", {}, who), ` ${why}`)));
}

// ---- jobs

const cards = new Map();
const watcher = new IntersectionObserver(seen => {  // charts out of sight are not drawn again
    for (const e of seen) { const card = cards.get(e.target.dataset.job); if (card) card.seen = e.isIntersecting; }
    view.dirty.add("jobs"); draw();
}, {rootMargin: "200px"});
function drawJobs() {
    const live = [...fleet.jobs.values()].filter(j => !ENDED.includes(j.state)), ended = [...fleet.jobs.values()].filter(j => ENDED.includes(j.state));
    const shown = live.length ? live.reverse() : ended.slice(-3).reverse();
    const names = new Set(shown.map(j => j.job));
    for (const [name, card] of cards) if (!names.has(name)) { watcher.unobserve(card.node); card.node.remove(); cards.delete(name); }
    if (shown.length) for (const empty of $("job-list").querySelectorAll(":scope > p")) empty.remove();
    shown.forEach((job, place) => {
        if (!cards.has(job.job)) cards.set(job.job, newCard(job));
        const card = cards.get(job.job), at = $("job-list").children[place];
        if (at !== card.node) $("job-list").insertBefore(card.node, at ?? null);
        drawCard(card, job);
    });
    drawJobChoice();
}
function newCard(job) {
    const card = {state: el("span", {class: "badge"}), facts: el("div", {class: "facts"}), why: el("p"), slow: el("div"), speed: s("svg", {role: "img"}), size: s("svg", {role: "img"}),
        table: el("tbody"), more: el("summary"), drawn: "", seen: true, charted: false};
    const right = el("span", {class: "right"}, el("button", {type: "button", onclick: () => showLog(job.job, 0)}, "Logs"));
    card.cancel = el("button", {type: "button", class: "danger", onclick: () => act("cancel", {job: job.job}, `Cancel job ${job.job}?`)}, "Cancel");
    if (view.act) right.append(card.cancel);
    card.speedName = el("h4", {}, "steps per second"); card.sizeName = el("h4", {}, "workers");
    card.node = el("article", {class: "job", "data-job": job.job, "aria-label": `job ${job.job}`}, el("header", {}, el("h3", {}, job.job), card.state, right), card.facts, card.why, card.slow, card.speedName, card.speed, card.sizeName, card.size,
        el("details", {}, card.more, el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": `interruptions of ${job.job}`},
            el("table", {}, el("thead", {}, el("tr", {}, ...["when", "what", "workers", "pause", "steps repeated", "why"].map(t => el("th", {}, t)))), card.table))));
    watcher.observe(card.node);
    return card;
}
function drawCard(card, job) {
    text(card.state, job.state);
    card.cancel.hidden = ENDED.includes(job.state);
    card.state.className = "badge " + (job.state === "running" || job.state === "succeeded" ? "good" : job.state === "failed" ? "bad" : "wait");
    const of = fleet.series.get(job.job) ?? {points: [], marks: [], forgotten: 0}, ended = ENDED.includes(job.state);
    const end = ended ? of.points.at(-1)?.[0] ?? now() : now(), begin = view.range ? end - view.range : of.points[0]?.[0] ?? end - 60;
    const from = Math.max(begin, Math.min(of.points[0]?.[0] ?? begin, of.marks[0]?.at ?? Infinity, end - 30));
    const speed = speeds(of.points, from, end), recent = ended ? 0 : rate(of.points, end - 20, end);
    const counts = job.version > 0 || of.points.some(p => p[1] > 0);  // a plain command counts no steps
    const facts = [counts ? ["steps", job.version.toLocaleString("en-US")] : job.outside ? ["steps outside elastic.run", job.outside.toLocaleString("en-US")] : null, counts && !ended ? ["steps/s", short(recent)] : null, job.step_s ? ["a step", seconds(job.step_s)] : null,
        ended ? null : ["workers", `${job.world_size} (${job.min_workers} to ${job.max_workers})`], counts ? ["repeated", job.repeated.toLocaleString("en-US")] : null,
        ["age", span(now() - job.since)], job.deadline != null ? ["due in", span(job.deadline - now())] : null, job.finish != null ? ["done in", span(job.finish - now())] : null];
    put(card.facts, ...facts.filter(Boolean).map(([name, value]) => el("span", {}, `${name} `, el("b", {}, value))));
    const error = job.error.trim().split("\n").at(-1);
    text(card.why, [job.why, job.step_why, error && !job.why.includes(error) ? error : "", job.hint].filter(Boolean).join("; "));
    card.why.hidden = !card.why.textContent;
    put(card.slow, ...job.slow.map(w => el("p", {class: "slow"}, el("b", {}, `Rank ${w.rank} is slow: `),
        `${w.worker} computes ${seconds(w.compute_s)} in a step, the median ${seconds(w.median_s)}, for ${w.steps.toLocaleString("en-US")} steps.`)));
    const marks = of.marks.filter(m => m.at >= from);
    const title = `${job.job}: ${short(recent)} steps per second now, ${count(marks.length, "change")} in the time shown`;
    const empty = of.points.length < 2 && !marks.length;
    for (const node of [card.size, card.sizeName]) node.toggleAttribute("hidden", empty);
    for (const node of [card.speed, card.speedName]) node.toggleAttribute("hidden", empty || !counts);
    if (!empty && (card.seen || !card.charted)) {
        card.charted = true;
        if (counts) chart(card.speed, title, speed, marks, from, end, {height: 130, style: "line", symbols: true, times: false});
        chart(card.size, `${job.job}: workers`, sizes(of, from, end), marks, from, end, {height: counts ? 70 : 84, style: "size", symbols: !counts, times: true});
    }
    drawMarks(card, of);
}
function drawMarks(card, of) {
    const key = JSON.stringify(of.marks.at(-1) ?? 0) + of.marks.length;
    if (key === card.drawn) return;
    card.drawn = key;
    text(card.more, of.marks.length ? `${count(of.marks.length + of.forgotten, "change")} of its workers${of.forgotten ? `, the newest ${of.marks.length} here` : ""}` : "no interruption");
    put(card.table, ...[...of.marks].reverse().map(m => el("tr", {}, el("td", {}, clock(m.at)), el("td", {}, m.cause), el("td", {}, String(m.workers || "–")),
        el("td", {}, m.pause_s == null ? "–" : seconds(m.pause_s)), el("td", {}, String(m.repeated)), el("td", {}, m.why))));
}
// Steps made between two points; a return to a checkpoint makes none.
function made(points) {
    const found = [[points[0]?.[0] ?? 0, 0]];
    for (let i = 1; i < points.length; i++) found.push([points[i][0], found[i - 1][1] + Math.max(0, points[i][1] - points[i - 1][1])]);
    return found;
}
function valueAt(sums, at) {
    let low = 0, high = sums.length - 1;
    if (at <= sums[0][0]) return sums[0][1];
    if (at >= sums[high][0]) return sums[high][1];
    while (high - low > 1) { const middle = (low + high) >> 1; if (sums[middle][0] <= at) low = middle; else high = middle; }
    const [a, x] = sums[low], [b, y] = sums[high];
    return x + (y - x) * (at - a) / (b - a);
}
function rate(points, from, to) {
    const last = points.at(-1)?.[0];
    if (points.length < 2) return 0;
    const end = Math.min(to, last), begin = Math.max(Math.min(from, end - 4), points[0][0]), sums = made(points);
    return end > begin && to - last < 15 ? (valueAt(sums, end) - valueAt(sums, begin)) / (end - begin) : 0;
}
function speeds(points, from, end) {
    if (points.length < 2) return [];
    const sums = made(points), first = Math.max(from, points[0][0]), last = Math.min(end, points.at(-1)[0]), width = Math.max((end - from) / BINS, 2.2), found = [];
    for (let at = first; at + width * 0.6 < last; at += width) {
        const to = Math.min(at + width, last);
        found.push([at + width / 2, (valueAt(sums, to) - valueAt(sums, at)) / (to - at)]);
    }
    return found;
}
function sizes(of, from, end) {
    const found = [], all = [...of.points.map(p => [p[0], p[2]]), ...of.marks.filter(m => m.generation).map(m => [m.at, m.workers])].sort((a, b) => a[0] - b[0]);
    let size = all[0]?.[1] ?? 0;
    for (const [at, n] of all) {
        if (at < from) { size = n; continue; }
        if (!found.length) found.push([Math.max(from, all[0][0]), size]);
        if (n !== size) { found.push([at, size], [at, n]); size = n; }
    }
    if (found.length) found.push([Math.min(end, all.at(-1)[0]), size]);
    return found;
}
function nice(most) {
    if (!(most > 0)) return 1;
    const unit = 10 ** Math.floor(Math.log10(most));
    return [1, 2, 3, 4, 5, 6, 8, 10].map(k => k * unit).find(v => v >= most * 0.999);
}
function ticks(from, end, width) {
    const steps = [10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800], wanted = Math.max(2, width / 110), step = steps.find(v => (end - from) / v <= wanted) ?? 2592000, found = [];
    for (let at = Math.ceil(from / step) * step; at <= end; at += step) found.push([at, step < 60 ? clock(at) : step >= 86400 ? day(at).slice(5) : minute(at)]);
    return found;
}
function chart(node, title, line, marks, from, end, {height, style, symbols, times}) {
    const width = Math.max(200, Math.round(node.parentNode.clientWidth - 32)), left = 38, top = symbols ? 14 : 4, bottom = height - (times ? 18 : 4);
    const most = nice(Math.max(0, ...line.map(p => p[1]))), x = at => left + (width - left) * (at - from) / Math.max(1e-9, end - from), y = v => bottom - (bottom - top) * v / most;
    node.setAttribute("viewBox", `0 0 ${width} ${height}`); node.setAttribute("height", height);
    const parts = [s("title", {}, document.createTextNode(title))];
    for (const v of height > 100 ? [0, most / 2, most] : [0, most]) parts.push(s("line", {class: v ? "grid" : "axis", x1: left, x2: width, y1: y(v), y2: y(v)}), s("text", {x: left - 6, y: y(v) + 4, "text-anchor": "end"}, document.createTextNode(short(v))));
    for (const [at, label] of ticks(from, end, width - left)) {
        parts.push(s("line", {class: "grid", x1: x(at), x2: x(at), y1: top, y2: bottom}));
        if (times && x(at) > left + 8 && x(at) < width - 18) parts.push(s("text", {x: x(at), y: height - 4, "text-anchor": "middle"}, document.createTextNode(label)));
    }
    if (line.length > 1) {
        const d = line.map(([at, v], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(v).toFixed(1)}`).join("");
        parts.push(s("path", {class: `${style}-area`, d: `${d}L${x(line.at(-1)[0]).toFixed(1)} ${bottom}L${x(line[0][0]).toFixed(1)} ${bottom}Z`}), s("path", {class: style, d}));
    }
    parts.push(...drawnMarks(marks, x, top, bottom, symbols));
    node.replaceChildren(...parts);
}
function drawnMarks(marks, x, top, bottom, symbols) {
    const found = [], near = new Map();
    for (const m of marks) { const key = marks.length > MOST_SHOWN_MARKS ? Math.round(x(m.at) / 6) : m; if (!near.has(key)) near.set(key, []); near.get(key).push(m); }
    for (const of of near.values()) {
        const m = of.find(o => CAUSES[o.cause] === "loss") ?? of[0], kind = CAUSES[m.cause] ?? "other", at = x(m.at);
        found.push(s("line", {class: `at ${kind}`, x1: at, x2: at, y1: top, y2: bottom}));
        if (symbols) { const shape = symbol(kind, at, top - 6); shape.append(s("title", {}, document.createTextNode(of.map(o => `${clock(o.at)} ${o.cause}${o.pause_s == null ? "" : `, paused ${seconds(o.pause_s)}`}: ${o.why}`).join("\n")))); found.push(shape); }
    }
    return found;
}
function symbol(kind, x, y) {
    const d = {loss: `M${x - 5} ${y - 4}h10l-5 9z`, notice: `M${x} ${y - 6}l5 6l-5 6l-5-6z`, join: `M${x - 5} ${y + 4}h10l-5-9z`}[kind];
    return d ? s("path", {class: kind, d}) : s("circle", {class: kind, cx: x, cy: y, r: 4});
}
function drawPast() {
    const ended = [...fleet.jobs.values()].filter(j => ENDED.includes(j.state)).reverse();
    $("past").hidden = !ended.length;
    text($("past").querySelector("summary"), count(ended.length, "ended job"));
    put($("past").querySelector("tbody"), ...ended.slice(0, MOST_PAST).map(j => el("tr", {}, el("td", {}, j.job), el("td", {}, j.state), el("td", {class: "number"}, j.version.toLocaleString("en-US")), el("td", {}, j.why))));
}

// ---- hosts: a cell for each, by zone, and a list of which only the visible rows exist

const zoneOf = h => h.pool.split("/").slice(0, 2).reverse().join(", "), marketOf = h => h.pool.split("/").at(-1), typeOf = h => h.pool.split("/").slice(2, -1).join("/");
const zones = new Map(), SIZE = 13;
function drawZones() {
    const groups = new Map(), totals = {};
    for (const h of workerHosts()) { const z = zoneOf(h); if (!groups.has(z)) groups.set(z, []); groups.get(z).push(h); totals[stateOf(h)] = (totals[stateOf(h)] ?? 0) + 1; }
    for (const [name, zone] of zones) if (!groups.has(name)) { zone.node.remove(); zones.delete(name); }
    for (const name of [...groups.keys()].sort()) {
        if (!zones.has(name)) { const zone = {button: el("button", {type: "button", onclick: () => find(name.split(", ")[0])}), note: el("small"), svg: s("svg", {"aria-hidden": "true"}), cells: new Map()};
            zone.svg.addEventListener("click", e => { if (e.target.dataset.host) choose(e.target.dataset.host, true); });
            zone.node = el("div", {class: "zone"}, el("div", {}, zone.button, zone.note), zone.svg); text(zone.button, name); zones.set(name, zone); $("zones").append(zone.node); }
        drawZone(zones.get(name), groups.get(name));
    }
    put($("states"), ...STATES.filter(([state]) => totals[state]).map(([state, name]) => el("li", {}, s("svg", {viewBox: "0 0 14 14"}, s("rect", {class: `cell ${state}`, x: 2, y: 2, width: 10, height: 10})), el("b", {}, String(totals[state])), name)),
        el("li", {}, s("svg", {viewBox: "0 0 14 14"}, s("rect", {class: "cell stopped", x: 2, y: 2, width: 10, height: 10, rx: 5})), "round: on demand"));
}
function drawZone(zone, hosts) {
    const counts = STATES.map(([state, name]) => [hosts.filter(h => stateOf(h) === state).length, name]).filter(c => c[0]);
    text(zone.note, counts.map(c => c.join(" ")).join(", "));
    const columns = Math.max(8, Math.floor(zone.svg.clientWidth / SIZE)), names = new Set(hosts.map(h => h.host));
    for (const [name, cell] of zone.cells) if (!names.has(name)) { cell.remove(); zone.cells.delete(name); }
    hosts.forEach((h, i) => {
        let cell = zone.cells.get(h.host);
        if (!cell) { cell = s("rect", {width: 9, height: 9, "data-host": h.host}); zone.cells.set(h.host, cell); zone.svg.append(cell); }
        const shape = `cell ${stateOf(h)}${h.host === view.chosen ? " chosen" : ""}`, place = `${i % columns},${Math.floor(i / columns)},${marketOf(h)}`;
        if (cell.dataset.shape !== shape) { cell.dataset.shape = shape; cell.setAttribute("class", shape); }
        if (cell.dataset.place !== place) { cell.dataset.place = place; cell.setAttribute("x", 2 + SIZE * (i % columns)); cell.setAttribute("y", 2 + SIZE * Math.floor(i / columns)); cell.setAttribute("rx", marketOf(h) === "on-demand" ? 5 : 1); }
    });
    const height = SIZE * Math.ceil(hosts.length / columns) + 2, box = `0 0 ${columns * SIZE} ${height}`;
    if (zone.svg.getAttribute("viewBox") !== box) { zone.svg.setAttribute("viewBox", box); zone.svg.setAttribute("preserveAspectRatio", "xMinYMin"); zone.svg.setAttribute("height", height); }
}
function gpuText(h) {
    if (!h.gpus.length) return "";
    const bad = h.gpus.find(g => g.why || g.errors), use = h.gpus.filter(g => g.used_percent != null), hot = Math.max(0, ...h.gpus.map(g => g.celsius ?? 0));
    return bad ? "GPU error" : [use.length ? `${Math.round(use.reduce((a, g) => a + g.used_percent, 0) / use.length)} %` : "", hot ? `${hot} °C` : ""].filter(Boolean).join(", ");
}
const matches = (h, words) => { const all = [h.host, stateOf(h), h.pool, h.jobs.join(" "), h.why, gpuText(h)].join(" ").toLowerCase(); return words.every(w => all.includes(w)); };
function find(words) { $("find").value = words; view.find = words; filter(); }
function filter() {
    const words = view.find.toLowerCase().split(/\s+/).filter(Boolean), hosts = [...fleet.hosts.values()];
    view.shown = words.length ? hosts.filter(h => matches(h, words)) : hosts;
    text($("found"), words.length ? `${count(view.shown.length, "host")} of ${hosts.length}` : count(hosts.length, "host"));
    view.first = -1;
    drawRows();
}
const rowHeight = () => matchMedia("(max-width:900px)").matches ? 50 : 30;
const rows = [];  // elements that are used again
function drawRows() {
    const list = $("host-list"), height = rowHeight(), first = Math.max(0, Math.floor(list.scrollTop / height) - 3), number = Math.min(view.shown.length - first, Math.ceil(352 / height) + 7);
    if (first === view.first) return;
    view.first = first;
    const spacer = list.querySelector(".spacer");
    spacer.style.height = `${view.shown.length * height}px`;
    list.style.height = `${Math.min(352, Math.max(1, view.shown.length) * height + 2)}px`;
    for (let i = 0; i < Math.max(number, rows.length); i++) {
        if (!rows[i]) { const cells = ["host", "state", "pool", "slots number", "gpu", "why"].map(c => el("span", {class: c})); rows[i] = el("div", {class: "row", role: "option", id: `row-${i}`, onclick: e => choose(e.currentTarget.dataset.host, false)}, ...cells); list.append(rows[i]); }
        const row = rows[i], h = view.shown[first + i];
        row.hidden = !h || i >= number;
        if (row.hidden) continue;
        row.style.transform = `translateY(${(first + i) * height}px)`;
        row.dataset.host = h.host;
        row.setAttribute("aria-setsize", view.shown.length); row.setAttribute("aria-posinset", first + i + 1);
        row.setAttribute("aria-selected", String(h.host === view.chosen));
        const [host, state, pool, slots, gpu, why] = row.children;
        text(host, h.host);
        if (state.dataset.state !== stateOf(h)) { state.dataset.state = stateOf(h); put(state, el("i", {class: stateOf(h)}, nameOf(stateOf(h)))); }
        text(pool, h.pool.split("/").slice(1).join(" ")); text(slots, h.role === "worker" ? count(h.slots, "slot") : h.role);
        text(gpu, gpuText(h) || h.jobs.join(" ")); text(why, whyOf(h));
    }
    list.setAttribute("aria-activedescendant", rows.find(r => !r.hidden && r.dataset.host === view.chosen)?.id ?? "");
}
const whyOf = h => h.until == null ? h.why : [`interruption notice: ends at ${clock(h.until)}`,
    ...h.why.split("; ").filter(part => part && !part.startsWith("interruption notice"))].join("; ");
function choose(host, scroll) {
    view.chosen = host;
    const at = view.shown.findIndex(h => h.host === host), list = $("host-list"), height = rowHeight();
    if (at >= 0 && (scroll || at * height < list.scrollTop || (at + 1) * height > list.scrollTop + list.clientHeight)) list.scrollTop = Math.max(0, at * height - list.clientHeight / 2);
    view.first = -1;
    drawRows(); drawZones(); drawHost();
}
function drawHost() {
    const h = fleet.hosts.get(view.chosen);
    $("host").hidden = !h;
    if (!h) return;
    const ranks = [...fleet.workers].flatMap(([job, of]) => of.filter(w => w[0].startsWith(h.host + "/")).map(([worker, rank, stage]) => [job, worker, rank, stage]));
    const facts = [["state", `${nameOf(stateOf(h))} for ${span(now() - h.since)}`], ["why", whyOf(h)], ["group", h.group], ["pool", h.pool], ["address", h.address],
        ["price", `${money(h.price_micros_h)}/h, on demand ${h.on_demand_micros_h ? money(h.on_demand_micros_h) + "/h" : "unknown"}`]].filter(f => f[1]);
    const head = el("header", {}, el("h3", {}, h.host), view.act && h.role === "worker" ? el("button", {type: "button", class: "danger", onclick: () => act("drain", {host: h.host}, `Drain ${h.host}? It leaves once its workers have, and is replaced.`)}, "Drain") : null);
    const workers = ranks.map(([job, worker, rank, stage]) => el("li", {}, `${job}: ${worker}, ${rank < 0 ? stage : `rank ${rank}`} `, rank >= 0 ? el("button", {type: "button", onclick: () => showLog(job, rank)}, "Logs") : null));
    const gpus = h.gpus.map(g => el("li", {}, `GPU ${g.index}: `, g.why || null, ...(g.why ? [] : [g.used_percent == null ? null : el("meter", {min: 0, max: 100, value: g.used_percent, "aria-label": "use"}),
        [g.used_percent == null ? "" : ` ${g.used_percent} % used`, g.memory_mib == null ? "" : `${(g.memory_mib / 1024).toFixed(1)} of ${((g.memory_total_mib ?? 0) / 1024).toFixed(0)} GiB`, g.celsius == null ? "" : `${g.celsius} °C`,
            g.errors == null ? "" : count(g.errors, "uncorrected error")].filter(Boolean).join(", ")])));
    put($("host"), head, el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])), workers.length ? el("ul", {}, ...workers) : null, gpus.length ? el("ul", {}, ...gpus) : null);
}
$("find").addEventListener("input", e => { view.find = e.target.value; $("host-list").scrollTop = 0; filter(); });
$("host-list").addEventListener("scroll", () => requestAnimationFrame(drawRows), {passive: true});
$("host-list").addEventListener("keydown", e => {
    const at = view.shown.findIndex(h => h.host === view.chosen), page = Math.max(1, Math.floor($("host-list").clientHeight / rowHeight()) - 1);
    const to = {ArrowDown: at + 1, ArrowUp: Math.max(0, at - 1), PageDown: at + page, PageUp: at - page, Home: 0, End: view.shown.length - 1}[e.key];
    if (to == null || !view.shown.length) return;
    e.preventDefault();
    choose(view.shown[Math.min(view.shown.length - 1, Math.max(0, to))].host, false);
});

// ---- events

function addEvents(news) {
    const list = $("event-list"), still = list.scrollTop > 4, before = list.scrollHeight;
    list.prepend(...[...news].reverse().map(e => {
        const loss = e.kind === "HostSilent" || / has failed| preempted|\(interrupted\)| notice/.test(e.text);
        return el("li", {class: loss ? "loss" : null}, el("time", {datetime: new Date(e.at * 1000).toISOString(), title: day(e.at)}, clock(e.at)), el("span", {}, e.text));
    }));
    while (list.children.length > MOST_EVENTS) list.lastChild.remove();
    if (still) list.scrollTop += list.scrollHeight - before;  // a reader further down stays where he is
}

// ---- logs

const base = location.pathname.replace(/[^/]*$/, "");
let reading = null;
function drawJobChoice() {
    const names = [...fleet.jobs.keys()].reverse().slice(0, 100), select = $("log-job");
    if (names.join() === [...select.options].map(o => o.value).join()) return;
    const was = select.value;
    put(select, ...names.map(name => el("option", {value: name}, name)));
    if (names.includes(was)) select.value = was;
}
function showLog(job, rank) {
    $("log-job").value = job; $("log-rank").value = rank;
    $("logs").scrollIntoView();
    readLog(job, rank);
}
async function readLog(job, rank) {
    reading?.abort();
    const own = reading = new AbortController(), log = $("log");
    log.hidden = false; log.textContent = "";
    text($("log-state"), "reading …");
    const decoder = new TextDecoder();
    let offset = null;
    while (!own.signal.aborted) try {
        const query = new URLSearchParams({job, rank, ...(offset == null ? {} : {offset})});
        const answer = await fetch(`${base}log?${query}`, {signal: own.signal});
        if (!answer.ok) { text($("log-state"), (await answer.json()).error); return; }
        const more = decoder.decode(await answer.arrayBuffer(), {stream: true});
        if (own.signal.aborted) return;
        if (offset == null && Number(answer.headers.get("X-Offset")) > more.length) addLog("… (older output: `spotfleet logs`)\n");
        offset = Number(answer.headers.get("X-Offset"));
        addLog(more);
        text($("log-state"), answer.headers.get("X-End") === "1" ? "ended" : "following");
        if (answer.headers.get("X-End") === "1") return;
    } catch (error) {
        if (own.signal.aborted) return;
        text($("log-state"), "the page’s server does not answer; trying again");
        await new Promise(done => setTimeout(done, 2000));
    }
}
function addLog(more) {
    if (!more) return;
    const log = $("log"), bottom = log.scrollTop + log.clientHeight > log.scrollHeight - 8;
    // colours of a terminal are left out; a progress bar's last state is kept
    const plain = more.replace(/\x1b\[[0-9;?]*[A-Za-z]/g, "").replace(/[^\n\r]*\r(?!\n)/g, "").replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, c => c === "\r" ? "" : "\ufffd");
    log.append(plain);
    if (log.textContent.length > MOST_LOG) log.textContent = log.textContent.slice(-MOST_LOG / 2).replace(/^[^\n]*\n/, "");
    if (bottom) log.scrollTop = log.scrollHeight;
}
const askLog = () => { if ($("log-job").value) readLog($("log-job").value, Math.max(0, Number($("log-rank").value) || 0)); };
$("log-show").addEventListener("click", askLog);
$("log-rank").addEventListener("keydown", e => { if (e.key === "Enter") askLog(); });

// ---- actions

async function act(what, of, question) {
    if (!confirm(question)) return;
    try {
        const answer = await fetch(`${base}${what}?${new URLSearchParams(of)}`, {method: "POST", headers: {"X-Spotfleet-Action": view.act}});
        if (!answer.ok) { const {error, hint} = await answer.json(); trouble([error, hint].filter(Boolean).join(". ")); }
    } catch { trouble("The page’s server does not answer: nothing was changed."); }
}
function trouble(why) { $("trouble").hidden = !why; text($("trouble"), why); }

// ---- start

const given = new URLSearchParams(location.hash.slice(1)).get("act");
if (given) { sessionStorage.setItem(base, given); history.replaceState(null, "", location.pathname); }  // kept for a reload, and no longer in sight
view.act = sessionStorage.getItem(base) ?? "";
put($("legend"), el("li", {}, "Interruptions:"), ...MARKS.map(([kind, name]) => el("li", {}, s("svg", {viewBox: "0 0 14 14"}, symbol(kind, 7, 7)), name)));
$("range").append(...RANGES.map(([name, range]) => el("label", {}, el("input", {type: "radio", name: "range", checked: range === view.range, onchange: () => { view.range = range; view.dirty.add("jobs"); draw(); }}), name)));
addEventListener("resize", () => { for (const part of ["jobs", "zones"]) view.dirty.add(part); draw(); });
const source = new EventSource(`${base}live`);
source.addEventListener("whole", e => take(JSON.parse(e.data), true));
source.addEventListener("changed", e => take(JSON.parse(e.data), false));
source.addEventListener("trouble", e => trouble(JSON.parse(e.data)));
source.addEventListener("open", () => trouble(""));
source.addEventListener("error", () => trouble("The page’s server does not answer. If `spotfleet page` has ended, type it again; the fleet goes on."));
