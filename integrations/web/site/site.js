// The two views, and the verdicts on dropped files.
"use strict";

(() => {
  const $ = (id) => document.getElementById(id);
  // From the best to the worst: the page shows the worst of its files.
  const VERDICTS = ["pass", "unchecked", "fail", "error"];
  let turn = 0;

  async function view() {
    const [name, query] = location.hash.slice(1).split("?");
    const layout = name === "layout";
    $("check-view").hidden = layout;
    $("layout-view").hidden = !layout;
    for (const [id, current] of [["tab-check", !layout], ["tab-layout", layout]])
      current ? $(id).setAttribute("aria-current", "page") : $(id).removeAttribute("aria-current");
    if (layout) await explorer.start(new URLSearchParams(query));
    document.body.dataset.ready = layout ? "layout" : "check";
  }

  async function judge(file) {
    const most = await marlinspike.maxFile();
    if (most.error) return most;
    if (file.size > most) return { error: `the file has ${file.size} bytes; this page takes ${most} or fewer` };
    try {
      return await marlinspike.check(file.name, new Uint8Array(await file.arrayBuffer()));
    } catch (error) {
      return { error: `the file cannot be read (${error.message})` };
    }
  }

  // Every text from the file is escaped: report/src/escape.rs.
  function show(answer) {
    $("report").innerHTML = answer.html ?? "";
  }

  function row(file, answer) {
    const line = document.createElement("tr"), verdict = answer.error ? "error" : answer.verdict;
    const badge = document.createElement("span"), name = document.createElement("td");
    badge.className = `badge ${verdict}`;
    badge.textContent = verdict;
    const wrong = (answer.outputs ?? []).filter((o) => o.verdict !== "pass").map((o) => o.name);
    const texts = [badge, name, answer.error ?? wrong.join(", ")];
    if (answer.html) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = file.name;
      button.addEventListener("click", () => show(answer));
      name.append(button);
    } else name.textContent = file.name;
    for (const content of texts) {
      const cell = content === name ? name : document.createElement("td");
      if (content !== name) cell.append(content);
      line.append(cell);
    }
    $("files").querySelector("tbody").append(line);
  }

  async function check(files) {
    const own = ++turn;
    if (!$("progress").hidden) marlinspike.cancel();
    $("report").replaceChildren();
    $("status").textContent = "";
    $("files").hidden = files.length < 2;
    $("files").querySelector("tbody").replaceChildren();
    document.body.dataset.verdict = "";
    const verdicts = [];
    for (const [i, file] of files.entries()) {
      $("progress").hidden = false;
      $("progress-text").textContent = files.length > 1
        ? `Checking ${file.name} (${i + 1} of ${files.length}) ...` : `Checking ${file.name} ...`;
      const answer = await judge(file);
      if (own !== turn) return;
      const verdict = answer.error ? "error" : answer.verdict;
      row(file, answer);
      verdicts.push(verdict);
      if (files.length === 1) $("status").textContent = `${file.name}: ${answer.error ?? verdict}`;
      // The first file of the worst verdict is the one shown.
      const worst = Math.max(...verdicts.slice(0, -1).map((v) => VERDICTS.indexOf(v)), -1);
      if (VERDICTS.indexOf(verdict) > worst) show(answer);
    }
    $("progress").hidden = true;
    if (files.length > 1) {
      const count = (verdict) => verdicts.filter((v) => v === verdict).length;
      const counts = VERDICTS.filter(count).map((v) => `${count(v)} ${v}`);
      $("status").textContent = `${files.length} files: ${counts.join(", ")}`;
    }
    document.body.dataset.verdict = VERDICTS[Math.max(...verdicts.map((v) => VERDICTS.indexOf(v)))];
  }

  async function example(name) {
    const answer = await fetch(name);
    if (!answer.ok) return void ($("status").textContent = `${name} cannot be loaded (${answer.status})`);
    check([new File([await answer.arrayBuffer()], name)]);
  }

  const drop = $("drop");
  for (const name of ["dragover", "drop"]) document.addEventListener(name, (event) => event.preventDefault());
  drop.addEventListener("dragover", () => drop.classList.add("over"));
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    drop.classList.remove("over");
    if (event.dataTransfer.files.length) check([...event.dataTransfer.files]);
  });
  $("file").addEventListener("change", () => {
    const files = [...$("file").files];
    // Otherwise the browser reports no change when the same file is chosen again.
    $("file").value = "";
    if (files.length) check(files);
  });
  $("cancel").addEventListener("click", () => {
    turn++;
    marlinspike.cancel();
    $("progress").hidden = true;
    $("status").textContent = "Cancelled.";
    document.body.dataset.verdict = "error";
  });
  for (const button of document.querySelectorAll("[data-example]"))
    button.addEventListener("click", () => example(button.dataset.example));
  window.addEventListener("hashchange", view);
  view();
})();
