// Calls into the WebAssembly module: input at input(len), answer at output(). Runs in the worker.
"use strict";

const module = (() => {
  let compiled, instance;

  async function start() {
    compiled ??= await WebAssembly.compileStreaming(fetch("marlinspike.wasm"));
    instance = await WebAssembly.instantiate(compiled, {});
  }

  // A trap leaves the memory in an unknown state: the next call starts anew.
  async function call(name, bytes, ...values) {
    if (!instance) await start();
    const exported = instance.exports;
    try {
      if (bytes) {
        const at = exported.input(bytes.length);
        new Uint8Array(exported.memory.buffer, at, bytes.length).set(bytes);
      }
      const length = exported[name](...values);
      const answer = new Uint8Array(exported.memory.buffer, exported.output(), length);
      return JSON.parse(new TextDecoder().decode(answer));
    } catch (error) {
      instance = undefined;
      return { error: `internal error (${error.message}); please report it` };
    }
  }

  const text = (request) => new TextEncoder().encode(JSON.stringify(request));
  return {
    // The file's name goes before its bytes.
    check: (file, bytes) => {
      const name = new TextEncoder().encode(file), all = new Uint8Array(name.length + bytes.length);
      all.set(name);
      all.set(bytes, name.length);
      return call("check", all, name.length);
    },
    layouts: () => call("layouts"),
    positions: (request) => call("positions", text(request)),
    // Largest file that `check` takes, in bytes.
    maxFile: async () => {
      if (!instance) await start();
      return instance.exports.max_file();
    },
  };
})();
