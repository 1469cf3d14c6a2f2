// Calls into the worker, each a promise of its answer.
"use strict";

const marlinspike = (() => {
  let worker, last = 0;
  const open = new Map();

  function end(error) {
    worker?.terminate();
    worker = undefined;
    for (const answer of open.values()) answer({ error });
    open.clear();
  }

  function call(name, ...values) {
    if (!worker) {
      worker = new Worker("worker.js");
      worker.onmessage = ({ data: { id, answer } }) => {
        open.get(id)?.(answer);
        open.delete(id);
      };
      worker.onerror = (event) => end(`the page's program cannot run (${event.message || "worker.js cannot be loaded"})`);
    }
    return new Promise((answer) => {
      open.set(++last, answer);
      worker.postMessage({ id: last, name, values });
    });
  }

  const names = ["check", "layouts", "positions", "maxFile"];
  return { ...Object.fromEntries(names.map((name) => [name, (...values) => call(name, ...values)])), cancel: () => end("cancelled") };
})();
