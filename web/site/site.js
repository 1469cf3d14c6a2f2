// The two views, and the verdict on a dropped file.
"use strict";

(() => {
  const $ = (id) => document.getElementById(id);

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

  async function check(file) {
    $("report").replaceChildren();
    document.body.dataset.verdict = "";
    const most = await marlinspike.maxFile();
    if (file.size > most) {
      $("status").textContent = `${file.name} has ${file.size} bytes; this page takes ${most} or fewer.`;
      document.body.dataset.verdict = "error";
      return;
    }
    $("status").textContent = `Checking ${file.name} ...`;
    const bytes = new Uint8Array(await file.arrayBuffer());
    // Let the browser draw the line above first.
    await new Promise((done) => setTimeout(done));
    const answer = await marlinspike.check(file.name, bytes);
    $("status").textContent = answer.error ? `${file.name}: ${answer.error}` : `${file.name}: ${answer.verdict}`;
    // Every text from the file is escaped: report/src/escape.rs.
    if (answer.html) $("report").innerHTML = answer.html;
    document.body.dataset.verdict = answer.error ? "error" : answer.verdict;
  }

  const drop = $("drop");
  for (const name of ["dragover", "drop"]) document.addEventListener(name, (event) => event.preventDefault());
  drop.addEventListener("dragover", () => drop.classList.add("over"));
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    drop.classList.remove("over");
    const [file] = event.dataTransfer.files;
    if (file) check(file);
  });
  $("file").addEventListener("change", () => $("file").files[0] && check($("file").files[0]));
  window.addEventListener("hashchange", view);
  view();
})();
