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

function drop(page, bytes, name) {
  const transfer = new page.DataTransfer();
  transfer.items.add(new page.File([bytes], name));
  const event = new page.DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: transfer });
  page.document.getElementById("drop").dispatchEvent(event);
}

async function verdict(page, bytes, name) {
  page.document.body.dataset.verdict = "";
  drop(page, bytes, name);
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
  await wait(150);
}

function point(page, id, [x, y], type = "pointerdown") {
  const canvas = page.document.getElementById(id), box = canvas.getBoundingClientRect();
  const at = (cell, start) => start + (cell + 0.5) * canvas.size;
  canvas.setPointerCapture = () => {};
  const event = { clientX: at(x, box.left), clientY: at(y, box.top), pointerId: 1, bubbles: true };
  canvas.dispatchEvent(new page.PointerEvent(type, event));
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
    const page = await frame(document.documentElement.clientWidth, "");
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

window.addEventListener("load", main);
