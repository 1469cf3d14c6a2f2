// Two pictures of a layout: the matrix, and the packed tensor. A value is selected in both at once.
"use strict";

const explorer = (() => {
  const $ = (id) => document.getElementById(id);
  const numbers = ["size_k", "size_n", "experts", "bits", "activation_bits", "group_size", "block"];
  const HUES = 16;
  let all = null, index = null, chosen = [], named = [];

  // Indices of a row of `values` (web/src/requests.rs, `positions`).
  const ELEMENT = 0, BIT = 1, WIDTH = 2, PART = 3, EXPERT = 4, ROW = 5, COL = 6, TILE_K = 7, TILE_N = 8, LANE = 9,
    MMA = 10, REGISTER = 11, INSIDE = 12;

  function request() {
    const own = { layout: $("layout").value, act_order: $("act_order").checked };
    for (const name of numbers) own[name] = Number($(name).value);
    return own;
  }

  const inMatrix = (v) => all.parts[v[PART]] === all.parts[0];
  const key = (expert, row, col) => (expert * all.shape[0] + row) * all.shape[1] + col;

  async function show() {
    const own = request();
    const layout = named.find((l) => l.name === own.layout);
    for (const label of document.querySelectorAll("[data-option]"))
      label.hidden = !layout.options.includes(label.dataset.option);
    $("size_n_name").textContent = own.layout === "kleidi_lhs" ? "M" : "N";
    const answer = await marlinspike.positions(own);
    $("error").textContent = answer.error ?? "";
    all = answer.error ? null : answer;
    chosen = [];
    if (all) {
      index = new Map();
      all.values.forEach((v, i) => inMatrix(v) && index.set(key(v[EXPERT], v[ROW], v[COL]), i));
      const [rows, cols] = all.packed_shape;
      const axis = { code: "k", scale: "group", zero_point: "group", bias: "one row" }[all.parts[0]];
      $("matrix-about").textContent =
        `${axis} down (${all.shape[0]}), ${$("size_n_name").textContent.toLowerCase()} across (${all.shape[1]})`;
      $("packed-about").textContent =
        `[${rows}, ${cols}] elements of ${all.element_bits} bits, in lines of 64 values; the lowest bits of an element are on the left`;
    }
    draw();
    describe();
  }

  // Where each value is in the picture of the packed tensor: a row of the tensor is cut into lines of 64 values.
  function packedGrid() {
    const LINE = 64, row = all.packed_shape[1];
    const x = [], y = [];
    let last = 0, column = 0, line = 0;
    for (const v of all.values) {
      const own = Math.floor(v[ELEMENT] / row);
      if (own !== last || column === LINE) [last, column, line] = [own, 0, line + 1];
      x.push(column++);
      y.push(line);
    }
    return { x, y, cols: Math.min(LINE, Math.max(...x) + 1), rows: line + 1 };
  }

  function cell(cols, figure) {
    const room = Math.max(240, figure.clientWidth || 480);
    return Math.max(4, Math.min(14, Math.floor(room / cols)));
  }

  function colour(v) {
    if (all.parts[v[PART]] === "padding") return "transparent";
    if (!inMatrix(v)) return "hsl(0 0% 55% / 0.75)";
    const turn = v.length > LANE ? v[LANE] : v[COL];
    return `hsl(${(turn % HUES) * (360 / HUES)} 55% ${Math.floor(turn / HUES) % 2 ? 42 : 58}%)`;
  }

  function paint(canvas, cols, rows, place) {
    const size = cell(cols, canvas.parentElement), scale = window.devicePixelRatio || 1;
    canvas.size = size;
    canvas.width = Math.min(16384, cols * size * scale);
    canvas.height = Math.min(16384, rows * size * scale);
    canvas.style.width = `${cols * size}px`;
    canvas.style.height = `${rows * size}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const gap = size > 5 ? 1 : 0.5;
    all.values.forEach((v, i) => {
      const at = place(v, i);
      if (!at) return;
      pen.fillStyle = colour(v);
      pen.fillRect(at[0] * size, at[1] * size, size - gap, size - gap);
    });
    const style = getComputedStyle(document.documentElement);
    pen.lineWidth = 2;
    for (const i of chosen) {
      const at = place(all.values[i], i);
      if (!at) continue;
      pen.strokeStyle = style.getPropertyValue("--text");
      pen.strokeRect(at[0] * size, at[1] * size, size - gap, size - gap);
    }
  }

  const inPlane = (v) => inMatrix(v) && [v[COL], v[EXPERT] * all.shape[0] + v[ROW]];

  function draw() {
    for (const id of ["matrix", "packed"]) $(id).hidden = !all;
    if (!all) return;
    const experts = Number($("experts").value);
    paint($("matrix"), all.shape[1], all.shape[0] * experts, inPlane);
    const grid = packedGrid();
    $("packed").grid = grid;
    paint($("packed"), grid.cols, grid.rows, (v, i) => [grid.x[i], grid.y[i]]);
  }

  function facts(i) {
    const v = all.values[i], part = all.parts[v[PART]];
    const line = all.packed_shape[1], len = all.packed_shape[0] * line;
    const inExpert = v[ELEMENT] % len;
    const last = v[BIT] + v[WIDTH] - 1;
    const bits = v[WIDTH] > all.element_bits ? `${v[WIDTH]} bits from here on` : `bits ${v[BIT]} to ${last}`;
    const rows = [["value", part.replace("_", " ")]];
    if (part === "code") rows.push([$("size_n_name").textContent === "M" ? "(k, m)" : "(k, n)", `(${v[ROW]}, ${v[COL]})`]);
    else if (part === "scale" || part === "zero_point") rows.push(["(group, n)", `(${v[ROW]}, ${v[COL]})`]);
    else if (part !== "padding") rows.push(["n", `${v[COL]}`]);
    rows.push(["expert", `${v[EXPERT]}`]);
    rows.push(["element", `[${Math.floor(inExpert / line)}, ${inExpert % line}], ${bits}`]);
    if (v.length > LANE) {
      rows.push(["tile", `(${v[TILE_K]}, ${v[TILE_N]})`]);
      rows.push(["lane", `${v[LANE]}`]);
      rows.push(["register", `b${v[REGISTER]}, value ${v[INSIDE]}, of mma column block ${v[MMA]}`]);
    }
    return rows;
  }

  function describe() {
    const list = $("selected");
    list.replaceChildren();
    const add = (term, text) => {
      const [dt, dd] = ["dt", "dd"].map((tag) => document.createElement(tag));
      dt.textContent = term;
      dd.textContent = text;
      list.append(dt, dd);
    };
    if (!all || !chosen.length) return add("selected", "nothing");
    if (chosen.length === 1) return facts(chosen[0]).forEach(([term, text]) => add(term, text));
    const span = (at) => {
      const seen = [...new Set(chosen.map((i) => all.values[i][at]).filter((x) => x !== undefined))].sort((a, b) => a - b);
      const shown = seen.slice(0, 12).join(", ");
      return seen.length > 12 ? `${shown}, ... (${seen.length})` : shown;
    };
    add("selected", `${chosen.length} values`);
    add(all.parts[0] === "code" ? "k" : "group", span(ROW));
    add("n", span(COL));
    add("elements", span(ELEMENT));
    if (chosen.some((i) => all.values[i].length > LANE)) {
      add("lanes", span(LANE));
      add("registers", span(REGISTER));
    }
  }

  function remember() {
    const own = request(), layout = named.find((l) => l.name === own.layout);
    const parts = ["layout", "size_k", "size_n", "experts", "group_size", ...layout.options];
    const query = new URLSearchParams(parts.map((name) => [name, own[name]]));
    if (chosen.length === 1) {
      const v = all.values[chosen[0]];
      query.set("element", v[ELEMENT]);
      query.set("bit", v[BIT]);
    }
    history.replaceState(null, "", `#layout?${query}`);
  }

  function select(indices) {
    chosen = indices;
    draw();
    describe();
    remember();
  }

  // The values under a rectangle of cells.
  function under(canvas, [x0, y0], [x1, y1]) {
    const [left, right] = [Math.min(x0, x1), Math.max(x0, x1)], [top, bottom] = [Math.min(y0, y1), Math.max(y0, y1)];
    const found = [];
    all.values.forEach((v, i) => {
      const at = canvas.id === "matrix" ? inPlane(v) : [canvas.grid.x[i], canvas.grid.y[i]];
      if (at && at[0] >= left && at[0] <= right && at[1] >= top && at[1] <= bottom) found.push(i);
    });
    return found;
  }

  function listen(canvas) {
    let from = null;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top].map((p) => Math.floor(p / canvas.size));
    };
    canvas.addEventListener("pointerdown", (event) => {
      from = at(event);
      canvas.setPointerCapture?.(event.pointerId);
      select(under(canvas, from, from));
    });
    canvas.addEventListener("pointermove", (event) => from && select(under(canvas, from, at(event))));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { from = null; });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!step || !all) return;
      event.preventDefault();
      const v = chosen.length ? all.values[chosen[0]] : all.values[0];
      const i = chosen.length ? chosen[0] : 0;
      const old = canvas.id === "matrix" ? inPlane(v) || [0, 0] : [canvas.grid.x[i], canvas.grid.y[i]];
      const to = [old[0] + step[0], old[1] + step[1]];
      const found = under(canvas, to, to);
      if (found.length) select(found);
    });
  }

  // The state that a link gives: #layout?layout=...&size_k=...&element=...&bit=...
  async function open(query) {
    for (const [name, value] of query) {
      const field = $(name);
      if (!field || !["layout", "act_order", ...numbers].includes(name)) continue;
      if (field.type === "checkbox") field.checked = value === "true";
      else field.value = value;
    }
    if (!named.some((l) => l.name === $("layout").value)) $("layout").value = named[0].name;
    await show();
    if (!all || !query.has("element")) return;
    const [element, bit] = ["element", "bit"].map((name) => Number(query.get(name) ?? 0));
    // The last value that starts at or before this bit.
    const at = all.values.findLastIndex((v) => v[ELEMENT] < element || (v[ELEMENT] === element && v[BIT] <= bit));
    if (at >= 0) select([at]);
  }

  async function start(query) {
    if (!named.length) {
      named = await marlinspike.layouts();
      if (named.error) return void ($("error").textContent = named.error);
      $("layout").append(...named.map((l) => new Option(l.title, l.name)));
      $("options").addEventListener("input", async () => { await show(); if (all) remember(); });
      $("options").addEventListener("submit", (event) => event.preventDefault());
      [$("matrix"), $("packed")].forEach(listen);
      window.addEventListener("resize", draw);
    }
    await open(query);
  }

  return { start };
})();
