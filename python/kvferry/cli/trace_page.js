"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { summary, stages, receives, sends } = data;
  // Okabe and Ito's colours, which those who see fewer colours can tell apart.
  const COLOURS = {
    held: "#b9c2cc", queued: "#e69f00", planned: "#f0e442", transfer: "#0072b2", confirm: "#009e73", report: "#cc79a7",
    lease: "#8fb8d6", failed: "#d55e00", unfinished: "#999999",
  };
  const BARS = ["held", "queued", "planned", "transfer", "confirm", "report"];
  const MEANINGS = Object.fromEntries(summary.stages.map((one) => [one.stage, one.meaning]));
  const byId = (id) => document.getElementById(id);
  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    // Only ever as text: names come from strangers.
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const number = (value) => {
    if (value === undefined || value === null) return "-";
    if (value === 0) return "0";
    const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
    return value.toLocaleString("en", { maximumFractionDigits: Math.min(digits, 6) });
  };
  const size = (bytes) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
    return `${number(bytes)} ${units[unit]}`;
  };
  const failed = (one) => one.outcome !== null && !["received", "given_back"].includes(one.outcome);
  const span = (one, stage) => {
    const { first, last } = stages[stage];
    const begin = one.moments[first], end = one.moments[last];
    if (begin === undefined || end === undefined || (stage === "held" && begin === end)) return null;
    return [begin, end];
  };
  const table = (into, head, rows, texts) => {
    const line = (cells, tag) => {
      const row = element("tr");
      cells.forEach((cell, index) => row.append(element(tag, cell, index < texts ? "text" : "")));
      return row;
    };
    const body = element("tbody");
    rows.forEach(({ cells, pick, colour }) => {
      const row = line(cells, "td");
      if (colour) {
        const swatch = element("span", undefined, "swatch");
        swatch.style.background = colour;
        row.firstChild.prepend(swatch);
      }
      if (pick) { row.className = "pick"; row.addEventListener("click", pick); }
      body.append(row);
    });
    const top = element("thead");
    top.append(line(head, "th"));
    into.replaceChildren(top, body);
  };

  // --- what stands above

  byId("source").textContent = `${summary.files.join(", ")}: ${summary.processes.join("; ")}`;
  const tile = (what, value, bad) => {
    const made = element("div", undefined, "tile");
    made.append(element("b", value, bad ? "bad" : ""), element("span", what, "faint"));
    byId("tiles").append(made);
  };
  const total = summary.stages.find((one) => one.stage === "total");
  tile("received", number(summary.received));
  tile("failed", number(summary.failed), summary.failed > 0);
  if (summary.given_back) tile("given back", number(summary.given_back));
  if (summary.unfinished) tile("without an end", number(summary.unfinished));
  tile("received", size(summary.bytes));
  if (total) tile("hand-over p50", `${number(total.p50_ms)} ms`);
  if (total) tile("hand-over p99", `${number(total.p99_ms)} ms`);
  const leases = Object.values(summary.sends).reduce((sum, some) => sum + some, 0);
  if (leases) tile("leases granted", number(leases));
  if (summary.sends.expired) tile("leases expired", number(summary.sends.expired), true);
  tile("time span", `${number(summary.seconds)} s`);
  const missing = summary.left_out + summary.damaged + data.not_shown;
  if (missing) tile("events not shown", number(missing), true);
  const legend = (name, colour) => {
    const item = element("span", undefined, "item");
    const swatch = element("span", undefined, "swatch");
    swatch.style.background = colour;
    item.append(swatch, name);
    item.title = MEANINGS[name] || "";
    byId("legend").append(item);
  };
  BARS.filter((stage) => receives.some((one) => span(one, stage))).forEach((stage) => legend(stage, COLOURS[stage]));
  if (receives.some(failed)) legend("failed", COLOURS.failed);
  if (receives.some((one) => one.outcome === null)) legend("without an end", COLOURS.unfinished);
  if (sends.length) legend("lease", COLOURS.lease);

  // --- the timeline

  const end = Math.max(1, ...[...receives, ...sends].map((one) => one.ended ?? one.began));
  /** Bars under each other where they are at the same time, per process. */
  const rowsOf = (items) => {
    const free = [];
    return [...items].sort((a, b) => a.began - b.began).map((item) => {
      let row = free.findIndex((at) => at <= item.began);
      if (row < 0) row = free.push(0) - 1;
      free[row] = item.ended ?? end;
      return { item, row };
    });
  };
  const HEAD = 22, AXIS = 26, MOST_ROWS = 60;
  const groups = [];
  summary.processes.forEach((name, process) => {
    for (const [what, items] of [["receives", receives], ["leases", sends]]) {
      const placed = rowsOf(items.filter((one) => one.process === process));
      if (!placed.length) continue;
      const rows = Math.min(MOST_ROWS, 1 + Math.max(...placed.map((one) => one.row)));
      groups.push({ title: `${name}: ${what}`, placed, rows, lease: what === "leases" });
    }
  });
  const rowCount = groups.reduce((sum, group) => sum + group.rows, 0);
  const HEIGHT = rowCount > 80 ? 8 : rowCount > 30 ? 13 : 18;
  const canvas = byId("timeline"), tip = byId("tip");
  const height = AXIS + groups.reduce((sum, group) => sum + HEAD + group.rows * HEIGHT + 6, 0) + 6;
  canvas.style.height = `${height}px`;
  let view = [-end * 0.01, end * 1.01];
  let hits = [], chosen = null;

  const draw = () => {
    const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const paint = canvas.getContext("2d");
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    paint.scale(ratio, ratio);
    paint.clearRect(0, 0, width, height);
    paint.font = "12px system-ui, 'Open Sans', sans-serif";
    paint.textBaseline = "middle";
    const x = (at) => (at - view[0]) / (view[1] - view[0]) * width;
    const step = 10 ** Math.floor(Math.log10((view[1] - view[0]) / 5));
    const tick = [1, 2, 5, 10].map((n) => n * step).find((n) => (view[1] - view[0]) / n <= 9) || step * 10;
    for (let at = Math.ceil(view[0] / tick) * tick; at <= view[1]; at += tick) {
      paint.fillStyle = colour("--line");
      paint.fillRect(Math.round(x(at)), AXIS - 6, 1, height);
      paint.fillStyle = colour("--faint");
      const unit = tick >= 1e6 ? [1e6, "s"] : tick >= 1e3 ? [1e3, "ms"] : [1, "us"];
      const digits = Math.max(0, -Math.floor(Math.log10(tick / unit[0]) + 1e-9));
      paint.fillText(`${(at / unit[0]).toFixed(Math.min(digits, 6))} ${unit[1]}`, x(at) + 4, AXIS / 2);
    }
    hits = [];
    let top = AXIS;
    const bar = (from, to, y, fill) => {
      const left = Math.max(-2, x(from)), right = Math.min(width + 2, x(to));
      if (right < 0 || left > width) return;
      paint.fillStyle = fill;
      paint.fillRect(left, y, Math.max(1, right - left), HEIGHT - 2);
    };
    for (const group of groups) {
      paint.fillStyle = colour("--fore");
      paint.fillText(group.title, 8, top + HEAD / 2);
      top += HEAD;
      for (const { item, row } of group.placed) {
        if (row >= MOST_ROWS) continue;
        const y = top + row * HEIGHT, to = item.ended ?? end;
        if (group.lease) {
          bar(item.began, to, y, item.outcome === "expired" ? COLOURS.failed : COLOURS.lease);
        } else {
          bar(item.began, to, y, failed(item) ? COLOURS.failed : item.outcome === null ? COLOURS.unfinished : COLOURS.held);
          if (!failed(item)) BARS.forEach((stage) => {
            const at = span(item, stage);
            if (at) bar(at[0], at[1], y, COLOURS[stage]);
          });
        }
        const left = x(item.began), right = Math.max(x(to), left + 3);
        if (right >= 0 && left <= width) hits.push({ left, right, top: y, bottom: y + HEIGHT, item, lease: group.lease });
        if (item === chosen) {
          paint.strokeStyle = colour("--fore");
          paint.lineWidth = 2;
          paint.strokeRect(left - 1, y - 1, right - left + 2, HEIGHT);
        }
        const room = Math.min(right, width) - Math.max(left, 0);
        if (HEIGHT > 12 && room > 60) {
          paint.save();
          paint.beginPath();
          paint.rect(Math.max(left, 0), y, room, HEIGHT);
          paint.clip();
          const light = group.lease || (!failed(item) && !span(item, "transfer"));
          paint.fillStyle = light ? "#10202e" : "#ffffff";
          paint.shadowColor = light ? "transparent" : "#000000aa";
          paint.shadowBlur = 3;
          paint.fillText(item.request, Math.max(left, 0) + 5, y + HEIGHT / 2 - 1);
          paint.restore();
        }
      }
      top += group.rows * HEIGHT + 6;
    }
  };

  const about = ({ item, lease }) => {
    const lines = [["request", item.request], ["process", summary.processes[item.process]],
      ["outcome", item.outcome === null ? "no end in the trace" : item.outcome]];
    const length = (item.ended ?? end) - item.began;
    lines.push([lease ? "lease held" : "in all", `${number(length / 1e3)} ms, from ${number(item.began / 1e3)} ms on`]);
    if (lease) return lines;
    if (item.message) lines.push(["why", item.message]);
    Object.keys(stages).forEach((stage) => {
      const at = span(item, stage);
      if (at && stage !== "total") lines.push([stage, `${number((at[1] - at[0]) / 1e3)} ms`]);
    });
    if (item.engine) lines.push(["from", `engine ${item.engine}, where it is ${item.remote_request}`]);
    if (item.bytes) lines.push(["size", `${size(item.bytes)}, ${number(item.blocks)} blocks, ${number(item.operations)} operations`]);
    return lines;
  };
  const show = (hit) => {
    chosen = hit.item;
    const list = element("dl");
    about(hit).slice(1).forEach(([what, text]) => list.append(element("dt", what), element("dd", text)));
    byId("details").replaceChildren(element("b", hit.item.request), list);
    byId("details").hidden = false;
    draw();
  };
  const find = (event) => {
    const box = canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    return hits.find((hit) => px >= hit.left && px <= hit.right && py >= hit.top && py < hit.bottom);
  };
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { from: event.clientX, view: [...view], moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = (event.clientX - drag.from) / canvas.clientWidth * (drag.view[1] - drag.view[0]);
      drag.moved ||= Math.abs(event.clientX - drag.from) > 3;
      view = [drag.view[0] - by, drag.view[1] - by];
      tip.hidden = true;
      draw();
      return;
    }
    const hit = find(event);
    tip.hidden = !hit;
    if (!hit) return;
    tip.replaceChildren(...about(hit).slice(0, 6).map(([what, text]) => element("div", `${what}: ${text}`)));
    const box = canvas.getBoundingClientRect();
    const left = Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 4);
    tip.style.left = `${Math.max(2, left)}px`;
    tip.style.top = `${Math.max(2, Math.min(event.clientY - box.top + 16, box.height - tip.offsetHeight - 2))}px`;
  });
  canvas.addEventListener("pointerup", (event) => {
    const hit = drag && !drag.moved && find(event);
    drag = null;
    if (hit) show(hit);
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = view[0] + event.offsetX / canvas.clientWidth * (view[1] - view[0]);
    const by = Math.exp(Math.sign(event.deltaY) * 0.2);
    if ((view[1] - view[0]) * by < 5 || (view[1] - view[0]) * by > end * 4) return;
    view = [at - (at - view[0]) * by, at + (view[1] - at) * by];
    draw();
  }, { passive: false });
  byId("whole").addEventListener("click", () => { view = [-end * 0.01, end * 1.01]; draw(); });
  window.addEventListener("resize", draw);
  draw();

  // --- the tables

  table(byId("stages"), ["stage", "what happens", "count", "p50", "p90", "p99", "max"], summary.stages.map((one) => ({
    cells: [one.stage, one.meaning, number(one.count), ...[one.p50_ms, one.p90_ms, one.p99_ms, one.max_ms].map(number)],
    colour: COLOURS[one.stage],
  })), 2);
  const COLUMNS = ["total", "held", "queued", "planned", "transfer", "confirm"];
  const look = (item) => () => {
    const length = Math.max(10, (item.ended ?? end) - item.began);
    view = [item.began - length * 0.2, (item.ended ?? end) + length * 0.2];
    show({ item, lease: false });
    byId("timeline").scrollIntoView({ block: "center" });
  };
  table(byId("slowest"), ["request", "outcome", "size", ...COLUMNS], summary.slowest.map((one) => {
    const item = receives.find((some) => some.request === one.request && some.outcome === one.outcome &&
      summary.processes[some.process] === one.process);
    const times = COLUMNS.map((stage) => number(one.stages_ms[stage]));
    return { cells: [one.request, one.outcome, size(one.bytes), ...times], pick: item && look(item) };
  }), 2);
  table(byId("failures"), ["cause", "first request", "what it said", "count"], summary.failures.map((one) => {
    const item = receives.find((some) => some.request === one.request && some.outcome === one.cause);
    return { cells: [one.cause, one.request, one.message, number(one.count)], pick: item && look(item) };
  }), 3);
  byId("failed").hidden = summary.failures.length === 0;
})();
