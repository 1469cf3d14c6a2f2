// Two pictures of a layout: the matrix, and the packed tensor. A value is selected in both at once.
"use strict";

const explorer = (() => {
  const $ = (id) => document.getElementById(id);
  const numbers = ["size_k", "size_n", "experts", "bits", "activation_bits", "group_size", "block"];
  const HUES = 16;
  // `grids` has a grid for each picture: its columns and rows, and the value in each cell, or -1.
  let all = null, grids = {}, chosen = [], marked = new Set(), named = [];

  // Indices of a row of `values` (integrations/web/src/requests.rs, `positions`).
  const ELEMENT = 0, BIT = 1, WIDTH = 2, PART = 3, EXPERT = 4, ROW = 5, COL = 6, TILE_K = 7, TILE_N = 8, LANE = 9,
    MMA = 10, REGISTER = 11, INSIDE = 12;

  function request() {
    const own = { layout: $("layout").value, act_order: $("act_order").checked };
    for (const name of numbers) own[name] = Number($(name).value);
    return own;
  }

  const inMatrix = (v) => all.parts[v[PART]] === all.parts[0];

  async function show() {
    document.body.dataset.shown = "";
    const own = request();
    const layout = named.find((l) => l.name === own.layout);
    for (const label of document.querySelectorAll("[data-option]"))
      label.hidden = !layout.options.includes(label.dataset.option);
    $("size_n_name").textContent = own.layout === "kleidi_lhs" ? "M" : "N";
    const answer = await marlinspike.positions(own);
    $("error").textContent = answer.error ?? "";
    all = answer.error ? null : answer;
    chosen = [];
    marked = new Set();
    if (all) {
      grids = { matrix: matrixGrid(own.experts), packed: packedGrid() };
      const [rows, cols] = all.packed_shape;
      const axis = { code: "k", scale: "group", zero_point: "group", bias: "one row" }[all.parts[0]];
      $("matrix-about").textContent =
        `${axis} down (${all.shape[0]}), ${$("size_n_name").textContent.toLowerCase()} across (${all.shape[1]})`;
      $("packed-about").textContent =
        `[${rows}, ${cols}] elements of ${all.element_bits} bits, in lines of 64 values; the lowest bits of an element are on the left`;
    }
    draw();
    describe();
    document.body.dataset.shown = own.layout;
  }

  function grid(cols, rows) {
    return { cols, rows, values: new Int32Array(cols * rows).fill(-1), cells: new Int32Array(all.values.length).fill(-1) };
  }

  function put(grid, cell, i) {
    grid.values[cell] = i;
    grid.cells[i] = cell;
  }

  function matrixGrid(experts) {
    const [rows, cols] = all.shape, own = grid(cols, rows * experts);
    all.values.forEach((v, i) => inMatrix(v) && put(own, (v[EXPERT] * rows + v[ROW]) * cols + v[COL], i));
    return own;
  }

  // A row of the tensor is cut into lines of 64 values.
  function packedGrid() {
    const LINE = 64, row = all.packed_shape[1], places = [];
    let last = 0, column = 0, line = 0, cols = 1;
    for (const v of all.values) {
      const own = Math.floor(v[ELEMENT] / row);
      if (own !== last || column === LINE) [last, column, line] = [own, 0, line + 1];
      places.push([column++, line]);
      cols = Math.max(cols, column);
    }
    const own = grid(cols, line + 1);
    places.forEach(([x, y], i) => put(own, y * cols + x, i));
    return own;
  }

  function colour(v) {
    if (all.parts[v[PART]] === "padding") return "transparent";
    if (!inMatrix(v)) return "hsl(0 0% 55% / 0.75)";
    const turn = v.length > LANE ? v[LANE] : v[COL];
    return `hsl(${(turn % HUES) * (360 / HUES)} 55% ${Math.floor(turn / HUES) % 2 ? 42 : 58}%)`;
  }

  const frame = (canvas) => canvas.parentElement.parentElement;

  // A browser limits the size of a canvas, so the canvas covers what the frame shows and is painted again on scrolling.
  function fit(canvas) {
    const { cols, rows } = grids[canvas.id], whole = canvas.parentElement, box = frame(canvas);
    const room = Math.max(240, box.parentElement.clientWidth || 480);
    const size = canvas.size = Math.max(4, Math.min(14, Math.floor(room / cols)));
    whole.style.width = `${cols * size}px`;
    whole.style.height = `${rows * size}px`;
    // The old picture must not bring scroll bars into the measure.
    canvas.style.width = canvas.style.height = "0px";
    const scale = window.devicePixelRatio || 1;
    const shown = [Math.min(box.clientWidth, cols * size), Math.min(box.clientHeight, rows * size)];
    [canvas.width, canvas.height] = shown.map((length) => Math.ceil(length * scale));
    [canvas.style.width, canvas.style.height] = shown.map((length) => `${length}px`);
  }

  function paint(canvas) {
    const { cols, rows, values } = grids[canvas.id], { size } = canvas, box = frame(canvas);
    const scale = window.devicePixelRatio || 1, [left, top] = [box.scrollLeft, box.scrollTop];
    const pen = canvas.getContext("2d"), gap = size > 5 ? 1 : 0.5;
    pen.setTransform(scale, 0, 0, scale, -left * scale, -top * scale);
    pen.clearRect(left, top, canvas.width, canvas.height);
    pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--text");
    pen.lineWidth = 2;
    const [lastX, lastY] = [left + box.clientWidth, top + box.clientHeight].map((end) => Math.ceil(end / size));
    const visible = [];
    for (let y = Math.floor(top / size); y < Math.min(rows, lastY); y++)
      for (let x = Math.floor(left / size); x < Math.min(cols, lastX); x++) {
        const i = values[y * cols + x];
        if (i < 0) continue;
        pen.fillStyle = colour(all.values[i]);
        pen.fillRect(x * size, y * size, size - gap, size - gap);
        if (marked.has(i)) visible.push([x, y]);
      }
    for (const [x, y] of visible) pen.strokeRect(x * size, y * size, size - gap, size - gap);
  }

  const pictures = () => [$("matrix"), $("packed")];

  function draw() {
    for (const canvas of pictures()) {
      frame(canvas).hidden = !all;
      if (!all) continue;
      fit(canvas);
      paint(canvas);
    }
  }

  // Scrolls the picture so that the first selected value is in its frame.
  function reveal(canvas) {
    const { cols, cells } = grids[canvas.id], { size } = canvas, box = frame(canvas);
    if (!chosen.length || cells[chosen[0]] < 0) return;
    const [x, y] = [(cells[chosen[0]] % cols) * size, Math.floor(cells[chosen[0]] / cols) * size];
    const moved = (at, start, room) => (at >= start && at + size <= start + room ? start : Math.max(0, at - room / 2));
    box.scrollTo(moved(x, box.scrollLeft, box.clientWidth), moved(y, box.scrollTop, box.clientHeight));
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

  // What a link holds of the selection: one value by its bit, several by the rectangle of a picture.
  function remember(rectangle) {
    const own = request(), layout = named.find((l) => l.name === own.layout);
    const parts = ["layout", "size_k", "size_n", "experts", "group_size", ...layout.options];
    const query = new URLSearchParams(parts.map((name) => [name, own[name]]));
    if (chosen.length === 1) {
      const v = all.values[chosen[0]];
      query.set("element", v[ELEMENT]);
      query.set("bit", v[BIT]);
    } else if (rectangle) query.set("select", rectangle);
    history.replaceState(null, "", `#layout?${query}`);
  }

  function select(indices, rectangle, from) {
    chosen = indices;
    marked = new Set(indices);
    describe();
    remember(rectangle);
    for (const canvas of pictures()) {
      if (canvas !== from) reveal(canvas);
      paint(canvas);
    }
  }

  // Selects the values under a rectangle of cells.
  function under(canvas, [x0, y0], [x1, y1], from) {
    const { cols, rows, values } = grids[canvas.id], found = [];
    const ends = (a, b, length) => [Math.max(0, Math.min(a, b)), Math.min(length - 1, Math.max(a, b))];
    const [[left, right], [top, bottom]] = [ends(x0, x1, cols), ends(y0, y1, rows)];
    for (let y = top; y <= bottom; y++)
      for (let x = left; x <= right; x++) if (values[y * cols + x] >= 0) found.push(values[y * cols + x]);
    select(found, `${canvas.id}:${left},${top},${right},${bottom}`, from);
  }

  function listen(canvas) {
    let from = null;
    const at = (event) => {
      const box = canvas.getBoundingClientRect(), { scrollLeft, scrollTop } = frame(canvas);
      return [event.clientX - box.left + scrollLeft, event.clientY - box.top + scrollTop].map((p) => Math.floor(p / canvas.size));
    };
    // A finger scrolls the picture; its tap arrives as a click.
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") return;
      from = at(event);
      canvas.setPointerCapture?.(event.pointerId);
      under(canvas, from, from, canvas);
    });
    canvas.addEventListener("pointermove", (event) => from && under(canvas, from, at(event), canvas));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { from = null; });
    canvas.addEventListener("click", (event) => event.pointerType === "touch" && under(canvas, at(event), at(event), canvas));
    canvas.addEventListener("keydown", (event) => {
      if (!all) return;
      const { cols, rows, cells, values } = grids[canvas.id];
      const old = chosen.length && cells[chosen[0]] >= 0 ? cells[chosen[0]] : 0;
      const [x, y] = [old % cols, Math.floor(old / cols)], page = Math.max(1, Math.floor(frame(canvas).clientHeight / canvas.size) - 1);
      const to = {
        ArrowLeft: [x - 1, y], ArrowRight: [x + 1, y], ArrowUp: [x, y - 1], ArrowDown: [x, y + 1],
        PageUp: [x, Math.max(0, y - page)], PageDown: [x, Math.min(rows - 1, y + page)],
        Home: [0, event.ctrlKey ? 0 : y], End: [cols - 1, event.ctrlKey ? rows - 1 : y],
      }[event.key];
      if (!to) return;
      event.preventDefault();
      const inside = to[0] >= 0 && to[0] < cols && to[1] >= 0 && to[1] < rows;
      if (inside && values[to[1] * cols + to[0]] >= 0) under(canvas, to, to);
    });
    frame(canvas).addEventListener("scroll", () => all && paint(canvas));
  }

  // Selects what a link names: `element` and `bit`, or `select=matrix:left,top,right,bottom`.
  function follow(query) {
    const range = query.get("select")?.match(/^(matrix|packed):(\d+),(\d+),(\d+),(\d+)$/);
    if (query.has("select")) {
      const [left, top, right, bottom] = range ? range.slice(2).map(Number) : [];
      const { cols, rows } = range ? grids[range[1]] : {};
      if (!range || right >= cols || bottom >= rows || left > right || top > bottom)
        return `select=${query.get("select")}: expected matrix or packed, a colon, and left,top,right,bottom inside the picture`;
      under($(range[1]), [left, top], [right, bottom]);
      return "";
    }
    if (!query.has("element")) return "";
    const elements = all.packed_shape[0] * all.packed_shape[1] * request().experts;
    const [element, bit] = ["element", "bit"].map((name) => Number(query.get(name) || 0));
    if (!Number.isInteger(element) || element < 0 || element >= elements)
      return `element=${query.get("element")}: expected 0 to ${elements - 1}`;
    if (!Number.isInteger(bit) || bit < 0 || bit >= all.element_bits)
      return `bit=${query.get("bit")}: expected 0 to ${all.element_bits - 1}`;
    // The last value that starts at or before this bit.
    const at = all.values.findLastIndex((v) => v[ELEMENT] < element || (v[ELEMENT] === element && v[BIT] <= bit));
    select([at]);
    return "";
  }

  // The state that a link gives; what it does not name has its default.
  async function open(query) {
    $("options").reset();
    const wrong = [];
    for (const [name, value] of query) {
      const field = ["layout", "act_order", ...numbers].includes(name) ? $(name) : null;
      if (field?.type === "checkbox") field.checked = value === "true";
      else if (field) field.value = value;
      if (field && field.type !== "checkbox" && field.value !== value) wrong.push(`${name}=${value}`);
      if (!field && !["element", "bit", "select"].includes(name)) wrong.push(name);
    }
    if (!named.some((l) => l.name === $("layout").value)) $("layout").value = named[0].name;
    await show();
    const problem = wrong.length ? `the link has unknown parts: ${wrong.join(", ")}` : all && follow(query);
    if (problem) $("error").textContent = problem;
  }

  async function start(query) {
    if (!named.length) {
      named = await marlinspike.layouts();
      if (named.error) {
        $("error").textContent = named.error;
        named = [];
        return;
      }
      $("layout").append(...named.map((l) => new Option(l.title, l.name)));
      $("options").addEventListener("input", async () => { await show(); if (all) remember(); });
      $("options").addEventListener("submit", (event) => event.preventDefault());
      pictures().forEach(listen);
      window.addEventListener("resize", draw);
    }
    await open(query);
  }

  return { start };
})();
