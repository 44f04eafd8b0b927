// node search.js WORKER INDEX QUERY...: what the search of the site shows for each query, as JSON.
const fs = require("fs");
const [worker, path, ...queries] = process.argv.slice(2);
const index = JSON.parse(fs.readFileSync(path, "utf8"));
// None is chosen. The search keeps what it finds in it, so each query has one of its own.
const filter = () => ({ input: { type: "operator", data: { operator: "and", operands: [] } }, aggregation: { input: [] } });
let answered;

global.self = global;
global.postMessage = (message) => answered(message);
(0, eval)(fs.readFileSync(worker, "utf8"));

const ask = (data) => new Promise((resolve, reject) => {
  answered = (message) => (message.type === 4 ? reject(new Error("the search failed")) : resolve(message.data));
  self.onmessage({ data });
});

(async () => {
  await ask({ type: 0, data: index });
  const shown = {};
  for (const input of queries) {
    const { items } = await ask({ type: 2, data: { input, filter: filter() } });
    shown[input] = items.map(({ id }) => index.items[id].location);
  }
  console.log(JSON.stringify(shown));
})();
