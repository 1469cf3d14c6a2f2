// Runs the WebAssembly module apart from the page, which stays usable and can end a call.
"use strict";

importScripts("wasm.js");

onmessage = async ({ data: { id, name, values } }) => {
  let answer;
  try {
    answer = await module[name](...values);
  } catch (error) {
    answer = { error: `the WebAssembly module cannot be loaded (${error.message})` };
  }
  postMessage({ id, answer });
};
