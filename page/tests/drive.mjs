// Drives a page in headless Chromium; tests/pages/browser.py talks to it in lines of JSON: a step in, what came of it out.

import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const [executablePath, profile] = process.argv.slice(2);
const quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"];
const silent = ["--disable-background-networking", "--disable-component-update"];
const fake = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"];
const browser = await chromium.launchPersistentContext(profile, {
  executablePath,
  args: [...quiet, ...silent, ...fake],
});
const page = browser.pages()[0];

const results = [];
const said = { requests: [], errors: [] };
browser.on("request", (request) => said.requests.push(request.url()));
page.on("pageerror", (error) => said.errors.push(error.message));
page.on("console", (message) => message.type() === "error" && said.errors.push(message.text()));
await page.exposeFunction("keep", (result) => results.push(result));
await page.addInitScript(() => {
  const base64 = (values) => {
    const bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
    let text = "";
    for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
    return btoa(text);
  };
  document.addEventListener("result", ({ detail, timeStamp }) => {
    const entries = Object.entries(detail.outputs);
    const outputs = entries.map(([name, { dims, data }]) => [name, { dims: [...dims], data: base64(data) }]);
    const result = { model: detail.model.name, pixels: base64(detail.pixels), outputs: Object.fromEntries(outputs) };
    window.keep({ ...result, seconds: timeStamp / 1000 });
  });
});

async function resultsAfter(count) {
  const end = Date.now() + 60_000;
  while (results.length < count && Date.now() < end) await new Promise((resolve) => setTimeout(resolve, 20));
  return results.splice(0);
}

const steps = {
  open: async ({ url }) => {
    await page.goto("about:blank"); // what the page before still computes comes until then
    results.length = 0;
    await page.goto(url);
  },
  results: ({ count }) => resultsAfter(count),
  give: async ({ file }) => {
    await page.waitForSelector(".stage"); // from then on the page listens
    await page.setInputFiles("#file", file);
  },
  click: ({ selector }) => page.click(selector),
  pick: ({ selector, value }) => page.selectOption(selector, value),
  press: ({ selector, key }) => page.press(selector, key),
  move: ({ selector, x, y }) => page.hover(selector, { position: { x, y } }),
  drag: async ({ from, to }) => {
    await page.mouse.move(...from);
    await page.mouse.down();
    await page.mouse.move(...to, { steps: 8 });
    await page.mouse.up();
  },
  wait: ({ selector }) => page.waitForSelector(selector).then(() => null),
  without: ({ name }) => page.addInitScript(`delete globalThis.${name}`), // from now on
  inFrame: async ({ selector }) => {
    const inside = page.frameLocator("iframe").locator(selector);
    await inside.first().waitFor();
    return inside.allInnerTexts();
  },
  evaluate: ({ script }) => page.evaluate(script),
  look: async ({ file, width, height, scheme }) => {
    await page.setViewportSize({ width, height });
    await page.emulateMedia({ colorScheme: scheme });
    await page.screenshot({ path: file, fullPage: true });
  },
  said: () => ({ requests: said.requests.splice(0), errors: said.errors.splice(0) }),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { step, ...given } = JSON.parse(line);
  try {
    console.log(JSON.stringify({ value: (await steps[step](given)) ?? null }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error) }));
  }
}
await browser.close();
