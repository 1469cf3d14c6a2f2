// Drives the page in a frame, as a user would, and sends the results to run.py.
"use strict";

const scheme = location.search.slice(1) || "light";
const PASSING = "/golden/cases/linear-bf16_u4b8_g128_act1.safetensors";

const wait = (ms) => new Promise((done) => setTimeout(done, ms));

async function until(what, check) {
  for (let i = 0; i < 600; i++) {
    const value = check();
    if (value) return value;
    await wait(50);
  }
  throw new Error(`waited 30 s for ${what}`);
}

function assert(condition, message) {
  if (!condition) throw new Error(message);
}

function equal(found, expected, what) {
  const [a, b] = [found, expected].map((x) => JSON.stringify(x));
  assert(a === b, `${what}: found ${a}, expected ${b}`);
}

async function frame(width, hash) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.src = `/index.html${hash}`;
  document.body.replaceChildren(frame);
  await until("the page", () => frame.contentDocument?.body?.dataset.ready);
  return frame.contentWindow;
}

// Follows a link in a page that is open.
async function follow(page, hash) {
  page.document.body.dataset.ready = "";
  page.location.hash = hash;
  await until(hash, () => page.document.body.dataset.ready);
}

function drop(page, files) {
  const transfer = new page.DataTransfer();
  for (const [bytes, name] of files) transfer.items.add(new page.File([bytes], name));
  const event = new page.DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: transfer });
  page.document.getElementById("drop").dispatchEvent(event);
}

async function verdict(page, bytes, name) {
  page.document.body.dataset.verdict = "";
  drop(page, [[bytes, name]]);
  return until(`the verdict on ${name}`, () => page.document.body.dataset.verdict);
}

const load = async (path) => new Uint8Array(await (await fetch(path)).arrayBuffer());

// The file with every byte of its tensor `out.NAME` inverted from a quarter on: safetensors starts with the header's length.
function damaged(bytes, name) {
  const length = Number(new DataView(bytes.buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  const [start, end] = header[name].data_offsets.map((at) => 8 + length + at);
  const copy = bytes.slice();
  for (let at = start + ((end - start) >> 2); at < end; at++) copy[at] ^= 0xff;
  return copy;
}

const facts = (page) => {
  const [terms, texts] = ["dt", "dd"].map((tag) => [...page.document.querySelectorAll(`#selected ${tag}`)].map((e) => e.textContent));
  return Object.fromEntries(terms.map((term, i) => [term, texts[i]]));
};

const fits = (page) => {
  const root = page.document.documentElement;
  assert(root.scrollWidth <= root.clientWidth, `the page is ${root.scrollWidth} wide in ${root.clientWidth}`);
};

async function set(page, id, value) {
  const field = page.document.getElementById(id);
  if (field.type === "checkbox") field.checked = value;
  else field.value = value;
  field.dispatchEvent(new page.Event("input", { bubbles: true }));
  await until("the layout", () => page.document.body.dataset.shown);
}

const scroller = (canvas) => canvas.parentElement.parentElement;

// A click on a cell, scrolled into view first; `from` is the place of the canvas before, for a drag that must not move it.
function point(page, id, [x, y], type = "pointerdown", init = {}) {
  const canvas = page.document.getElementById(id), box = scroller(canvas), { size } = canvas;
  if (type === "pointerdown" || type === "click") box.scrollTo(Math.max(0, (x - 8) * size), Math.max(0, (y - 20) * size));
  const { left, top } = canvas.getBoundingClientRect();
  const at = (cell, start, scrolled) => start + (cell + 0.5) * size - scrolled;
  canvas.setPointerCapture = () => {};
  const event = { clientX: at(x, left, box.scrollLeft), clientY: at(y, top, box.scrollTop), pointerId: 1, bubbles: true, ...init };
  canvas.dispatchEvent(new page.PointerEvent(type, event));
}

// Whether the picture has the selection's frame around a cell that is in view, in its own text colour.
function framed(page, id, [x, y]) {
  const canvas = page.document.getElementById(id), box = scroller(canvas), scale = page.devicePixelRatio;
  const [left, top] = [x * canvas.size - box.scrollLeft, y * canvas.size - box.scrollTop].map((p) => Math.round(p * scale));
  assert(left >= 0 && top >= 0 && left < canvas.width && top < canvas.height, `${id}: cell ${x}, ${y} is out of view`);
  const pixel = [...canvas.getContext("2d").getImageData(left, top, 1, 1).data.slice(0, 3)];
  const text = page.getComputedStyle(page.document.body).color.match(/\d+/g).map(Number);
  return pixel.every((value, i) => Math.abs(value - text[i]) < 90);
}

const tests = {
  async "a right case passes"(width) {
    const page = await frame(width, "");
    equal(await verdict(page, await load(PASSING), "right.safetensors"), "pass", "verdict");
    assert(page.document.querySelector("#report table"), "no table of outputs");
    fits(page);
  },
  async "a wrong case fails, with its first wrong value and a picture"(width) {
    const page = await frame(width, "");
    const bytes = damaged(await load(PASSING), "out.marlin_qweight");
    equal(await verdict(page, bytes, "wrong.safetensors"), "fail", "verdict");
    const card = page.document.querySelector("#report .card");
    assert(card.textContent.includes("expected 0x"), card.textContent.slice(0, 400));
    assert(card.querySelector("figure svg path"), "no picture");
    assert(page.document.querySelector("#report h3").textContent === "wrong.safetensors", "the case's name");
    fits(page);
    // The first wrong value is the first of the second quarter: row 4 of [16, 384], nibble 0, so tile (4, 0), lane 0.
    card.querySelector("dd a").click();
    await until("the explorer", () => page.document.body.dataset.ready === "layout");
    const found = facts(page);
    equal([found["(k, n)"], found.element, found.lane], ["(64, 0)", "[4, 0], bits 0 to 3", "0"], "facts");
  },
  async "a file that is no case is an error, and markup in its name stays text"(width) {
    const page = await frame(width, "");
    equal(await verdict(page, new Uint8Array(64), "<img src=x>.safetensors"), "error", "verdict");
    assert(page.document.getElementById("status").textContent.startsWith("<img src=x>"), "the name is missing");
    assert(!page.document.querySelector("img"), "markup");
    equal(await verdict(page, await load(PASSING), "right.safetensors"), "pass", "the next file's verdict");
  },
  async "every dropped file has a row, and the page shows the worst"(width) {
    const page = await frame(width, "");
    const right = await load(PASSING);
    page.document.body.dataset.verdict = "";
    drop(page, [[right, "right.safetensors"], [damaged(right, "out.marlin_qweight"), "wrong.safetensors"], [new Uint8Array(9), "none.safetensors"]]);
    equal(await until("three verdicts", () => page.document.body.dataset.verdict), "error", "verdict of the page");
    const rows = [...page.document.querySelectorAll("#files tbody tr")].map((row) => row.children[0].textContent + " " + row.children[1].textContent);
    equal(rows, ["pass right.safetensors", "fail wrong.safetensors", "error none.safetensors"], "rows");
    equal(page.document.getElementById("status").textContent, "3 files: 1 pass, 1 fail, 1 error", "status");
    page.document.querySelectorAll("#files button")[1].click();
    equal(page.document.querySelector("#report h3").textContent, "wrong.safetensors", "the report of the second file");
    fits(page);
  },
  async "the same file can be chosen again, and the examples have their verdicts"(width) {
    const page = await frame(width, "");
    const choose = async (bytes) => {
      page.document.body.dataset.verdict = "";
      const transfer = new page.DataTransfer(), input = page.document.getElementById("file");
      transfer.items.add(new page.File([bytes], "kernel.safetensors"));
      input.files = transfer.files;
      input.dispatchEvent(new page.Event("change", { bubbles: true }));
      equal(input.value, "", "the input's value, which must be empty for the same name to be a change");
      return until("a verdict", () => page.document.body.dataset.verdict);
    };
    const right = await load(PASSING);
    equal(await choose(damaged(right, "out.marlin_qweight")), "fail", "first");
    equal(await choose(right), "pass", "the mended file of the same name");
    for (const [example, expected] of [["right", "pass"], ["wrong", "fail"]]) {
      page.document.body.dataset.verdict = "";
      page.document.querySelector(`[data-example="example-${example}.safetensors"]`).click();
      equal(await until("the example", () => page.document.body.dataset.verdict), expected, example);
    }
    assert(page.document.querySelector("#report .diagnosis").textContent.includes("K"), "the known fault's cause");
  },
  async "a check can be cancelled, and the next one runs"(width) {
    const page = await frame(width, "");
    const right = await load(PASSING);
    page.document.body.dataset.verdict = "";
    drop(page, [[right, "a.safetensors"], [right, "b.safetensors"]]);
    page.document.getElementById("cancel").click();
    equal(page.document.getElementById("status").textContent, "Cancelled.", "status");
    equal(await verdict(page, right, "right.safetensors"), "pass", "the next verdict");
    assert(page.document.getElementById("progress").hidden, "progress is still shown");
  },
  // The m16n8k16 B fragment of the PTX manual: lane 0 holds k 0, 1 in b0 and k 8, 9 in b1 of column 0.
  // Nibble 1 of the first word is the second even value, that is b1's first.
  async "a link selects a bit"(width) {
    const page = await frame(width, "#layout?layout=marlin_qweight&size_k=64&size_n=64&bits=4&element=0&bit=4");
    const found = facts(page);
    equal([found["(k, n)"], found.tile, found.lane], ["(8, 0)", "(0, 0)", "0"], "facts");
    assert(found.register.startsWith("b1, value 0"), found.register);
    fits(page);
  },
  async "a click in one picture selects in the other"(width) {
    const page = await frame(width, "#layout?layout=marlin_qweight&size_k=64&size_n=64");
    // k 3, n 9: lane 4 (n mod 8) + 1 (k / 2), second value of b0 of the second product.
    point(page, "matrix", [9, 3]);
    const found = facts(page);
    equal([found["(k, n)"], found.lane], ["(3, 9)", "5"], "facts");
    assert(found.register.startsWith("b0, value 1, of mma column block 1"), found.register);
    const query = new URLSearchParams(page.location.hash.split("?")[1]);
    point(page, "packed", [0, 0]);
    equal(facts(page)["(k, n)"], "(0, 0)", "the first packed value");
    assert(query.has("element"), page.location.hash);
  },
  async "dragging selects a fragment"(width) {
    const page = await frame(width, "#layout?layout=marlin_qweight&size_k=64&size_n=64");
    point(page, "matrix", [0, 0]);
    point(page, "matrix", [7, 15], "pointermove");
    point(page, "matrix", [7, 15], "pointerup");
    equal(facts(page).selected, "128 values", "selection");
    equal(facts(page).lanes, "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... (32)", "lanes");
    const again = await frame(width, page.location.hash);
    equal(facts(again).selected, "128 values", "the selection of the link");
  },
  async "a selection does not move the pictures, and is scrolled into view in the other"(width) {
    const page = await frame(width, "#layout?layout=marlin_qweight&size_k=1024&size_n=128&bits=4");
    const top = () => page.document.getElementById("matrix").getBoundingClientRect().top;
    const before = top();
    point(page, "matrix", [0, 0]);
    equal(top(), before, "the picture's place");
    // The last value: lines of 64 values, 16 a line of the matrix's tile.
    const { element } = facts(page);
    point(page, "matrix", [127, 1023]);
    assert(facts(page).element !== element, "no other element");
    assert(scroller(page.document.getElementById("packed")).scrollTop > 1000, "the packed picture did not scroll");
  },
  async "a finger scrolls, a tap selects"(width) {
    const page = await frame(width, "#layout?layout=marlin_qweight&size_k=64&size_n=64");
    const touch = { pointerType: "touch" };
    point(page, "matrix", [5, 5], "pointerdown", touch);
    equal(facts(page).selected, "nothing", "after a finger's start");
    point(page, "matrix", [5, 5], "click", touch);
    equal(facts(page)["(k, n)"], "(5, 5)", "after a tap");
    equal(page.getComputedStyle(page.document.getElementById("matrix")).touchAction, "pan-x pan-y", "touch-action");
  },
  async "Home and End go to the ends"(width) {
    const page = await frame(width, "#layout?layout=marlin_qweight&size_k=64&size_n=128");
    point(page, "matrix", [9, 3]);
    const press = (key, ctrlKey = false) => {
      const event = new page.KeyboardEvent("keydown", { key, ctrlKey, bubbles: true, cancelable: true });
      page.document.getElementById("matrix").dispatchEvent(event);
      return facts(page)["(k, n)"];
    };
    equal([press("Home"), press("End"), press("Home", true), press("End", true)], ["(3, 0)", "(3, 127)", "(0, 0)", "(63, 127)"], "keys");
  },
  async "a link is whole, and a wrong one is an error"(width) {
    const page = await frame(width, "#layout?layout=marlin_qweight&size_k=64&size_n=128&bits=8&act_order=true");
    await follow(page, "#layout?layout=marlin_qweight&size_k=64&size_n=64");
    equal([page.document.getElementById("bits").value, page.document.getElementById("act_order").checked], ["4", false], "options that the link lacks");
    for (const part of ["element=999999", "element=1&bit=77", "select=matrix:0,0,64,0", "select=x", "size_q=3", "bits=5"]) {
      await follow(page, `#layout?layout=marlin_qweight&size_k=64&size_n=64&${part}`);
      const error = page.document.getElementById("error").textContent;
      assert(error.includes(part.split("&").at(-1).split("=")[0]), `${part}: ${error}`);
    }
  },
  // Largest sizes: a click far down must reach the cell under the pointer, and mark it there.
  async "every layout at its largest size"(width) {
    const page = await frame(width, "#layout");
    const names = [...page.document.getElementById("layout").options].map((o) => o.value);
    for (const name of names)
      for (const sizes of ["size_k=1024&size_n=128", "size_k=256&size_n=512", "size_k=256&size_n=128&experts=4"]) {
        await follow(page, `#layout?layout=${name}&${sizes}`);
        equal(page.document.getElementById("error").textContent, "", name);
        const matrix = page.document.getElementById("matrix"), whole = matrix.parentElement;
        const [cols, rows] = [whole.offsetWidth, whole.offsetHeight].map((length) => Math.round(length / matrix.size));
        const cell = [cols - 1, rows - 1];
        point(page, "matrix", cell);
        const found = facts(page), place = found["(k, n)"] ?? found["(k, m)"] ?? found["(group, n)"] ?? `(0, ${found.n})`;
        const experts = Number(page.document.getElementById("experts").value);
        equal(place, `(${rows / experts - 1}, ${cols - 1})`, `${name}, ${sizes}: the last cell`);
        equal(found.expert, `${experts - 1}`, `${name}: expert`);
        assert(framed(page, "matrix", cell), `${name}, ${sizes}: the selected cell is not framed`);
      }
  },
  async "act-order, bits, activations and experts change the layout"(width) {
    const page = await frame(width, "#layout?layout=marlin_qweight&size_k=64&size_n=64&group_size=32&element=0&bit=16");
    equal(facts(page)["(k, n)"], "(1, 0)", "without act-order");
    // Groups 0, 1, 0, 1, ...: the second row of group 0 is row 2.
    const sorted = await frame(width, "#layout?layout=marlin_qweight&size_k=64&size_n=64&group_size=32&act_order=true&element=0&bit=16");
    equal(facts(sorted)["(k, n)"], "(2, 0)", "with act-order");
    await set(sorted, "experts", "2");
    await set(sorted, "bits", "8");
    assert(sorted.document.getElementById("packed-about").textContent.startsWith("[4, 256]"), "8 bits");
    await set(sorted, "activation_bits", "8");
    equal(sorted.document.getElementById("error").textContent, "", "error");
    fits(sorted);
  },
  async "every layout is drawn, and a bad size is an error"(width) {
    const page = await frame(width, "#layout?size_k=256&size_n=128");
    const names = [...page.document.getElementById("layout").options].map((o) => o.value);
    assert(names.length >= 11, names.join());
    for (const name of names) {
      await set(page, "layout", name);
      equal(page.document.getElementById("error").textContent, "", name);
      point(page, "packed", [0, 0]);
      assert(facts(page).element, name);
      fits(page);
    }
    await set(page, "layout", "marlin_qweight");
    await set(page, "size_n", "60");
    assert(page.document.getElementById("error").textContent.includes("size_n"), "no error for N = 60");
    await set(page, "size_n", "99999999");
    assert(page.document.getElementById("error").textContent.includes("131072"), "no limit");
    await set(page, "size_n", "64");
    await set(page, "size_k", "2048");
    equal(page.document.getElementById("error").textContent, "", "131072 values");
  },
  async "the colour scheme is the system's"(width) {
    const page = await frame(width, "");
    const dark = page.matchMedia("(prefers-color-scheme: dark)").matches;
    equal(dark, scheme === "dark", "dark");
    const lightness = (colour) => colour.match(/\d+/g).slice(0, 3).reduce((sum, x) => sum + Number(x), 0);
    const style = page.getComputedStyle(page.document.body);
    const [back, text] = [style.backgroundColor, style.color].map(lightness);
    assert(dark ? back < 150 && text > 500 : back > 600 && text < 200, `${style.backgroundColor} ${style.color}`);
  },
};

async function main() {
  if (document.currentScript?.dataset.only || location.pathname.endsWith("shown.html")) {
    const width = document.documentElement.clientWidth;
    if (scheme === "layout") return frame(width, "#layout?element=17&bit=4");
    const page = await frame(width, "");
    return verdict(page, damaged(await load(PASSING), "out.marlin_qweight"), "wrong.safetensors");
  }
  const results = [];
  for (const width of [360, 1280])
    for (const [name, test] of Object.entries(tests)) {
      let why = null;
      try {
        await test(width);
      } catch (error) {
        why = error.message;
      }
      results.push([`${scheme}, ${width} wide: ${name}`, why]);
    }
  await fetch("/results", { method: "POST", body: JSON.stringify(results) });
}

window.addEventListener("DOMContentLoaded", main);
