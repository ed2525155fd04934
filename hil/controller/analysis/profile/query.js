// Run Perfetto's trace processor under Node: node query.js FOLDER, where FOLDER contains engine_bundle.js. Standard
// input and standard output contain messages of TraceProcessorRpcStream.
'use strict';
const fs = require('fs');
const path = require('path');
const vm = require('vm');
const worker_threads = require('worker_threads');

const folder = process.argv[2];

// This thread cannot interrupt a query, so another thread ends the process when the parent process has ended.
new worker_threads.Worker(`
  const parent = process.ppid;
  setInterval(() => process.ppid === parent || process.kill(process.pid, 'SIGKILL'), 500);
`, {eval: true}).unref();

// The bundle is made for a browser's worker, and reads its .wasm file with this class.
class XMLHttpRequest {
  open(method, name) { this.name = path.basename(name); }
  send() {
    const bytes = fs.readFileSync(path.join(folder, this.name));
    this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  }
}

// Write logs to stderr, because standard output contains only responses.
const say = (...words) => process.stderr.write(words.join(' ') + '\n');
const worker = {
  XMLHttpRequest, TextDecoder, URL, performance, setTimeout, crypto: globalThis.crypto,
  console: {log: say, warn: say, error: say, info: say, debug: say},
  WorkerGlobalScope: class {}, location: {href: 'http://localhost/engine_bundle.js'},
};
worker.self = worker;
vm.createContext(worker);
vm.runInContext(fs.readFileSync(path.join(folder, 'engine_bundle.js'), 'utf8'), worker, 'engine_bundle.js');

const port = {postMessage: (bytes) => writeAll(bytes)};
function writeAll(bytes) {
  for (let done = 0; done < bytes.length;) {
    try {
      done += fs.writeSync(1, bytes, done);
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
    }
  }
}
worker.onmessage({data: port});

// The engine is ready after the promises of the bundle are resolved.
setImmediate(() => {
  // The bundle accepts only arrays of its own context.
  const chunk = vm.runInContext('new Uint8Array(1 << 20)', worker);
  for (;;) {
    const size = fs.readSync(0, chunk, 0, chunk.length, null);
    if (size === 0) break;
    port.onmessage({data: chunk.subarray(0, size)});
  }
});
