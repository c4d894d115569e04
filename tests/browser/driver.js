// Does in Chromium what it is told on standard input, an object a line, and answers each with a line:
// {"value": …} or {"error": "…"}. tests/support/browser.rs has the words.

const { chromium } = require('playwright-core');
const { readFileSync } = require('fs');
const readline = require('readline');

const PATIENCE = 120_000;
const FLAGS = [
  '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync', '--hide-scrollbars',
];
const program = process.env.CHROMIUM || '/usr/bin/chromium';

let browser;
let context;
let page;
const log = { requests: [], errors: [] };

const visible = (selector, text) => {
  const found = text === undefined ? page.locator(selector) : page.locator(selector, { hasText: text });
  return found.filter({ visible: true }).first();
};

const words = {
  async open({ url }) {
    browser = await chromium.launch({ executablePath: program, args: FLAGS });
    context = await browser.newContext({ viewport: { width: 1280, height: 900 }, colorScheme: 'light' });
    page = await context.newPage();
    page.setDefaultTimeout(PATIENCE);
    page.on('request', (request) => log.requests.push(request.url()));
    page.on('pageerror', (error) => log.errors.push(String(error)));
    page.on('console', (message) => { if (message.type() === 'error') log.errors.push(message.text()); });
    await page.goto(url);
  },

  async see({ selector, text }) {
    await visible(selector, text).waitFor().catch(async () => {
      throw new Error(`not on screen: ${selector} with "${text}", but:\n${await page.innerText('body')}`);
    });
  },

  miss: ({ selector }) => page.locator(selector).filter({ visible: true }).first().waitFor({ state: 'detached' }),
  text: ({ selector }) => visible(selector).innerText(),
  attribute: ({ selector, name }) => page.locator(selector).first().getAttribute(name), // also of a line without height
  click: ({ selector }) => visible(selector).click(),
  reload: async () => { await page.reload(); },
  write: ({ text }) => page.keyboard.type(text),
  log: () => log,
  picture: async ({ path }) => { await page.screenshot({ path, fullPage: true }); },

  async press({ selector, key }) {
    const wanted = await visible(selector).elementHandle();
    for (let steps = 0; steps < 300; steps += 1) {
      if (await wanted.evaluate((element) => element === document.activeElement)) {
        await page.keyboard.press(key);
        return;
      }
      await page.keyboard.press('Tab');
    }
    throw new Error(`the tabulator key does not lead to ${selector}`);
  },

  async axe() {
    const source = readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8');
    const found = [];
    for (const colorScheme of ['light', 'dark']) {
      await page.emulateMedia({ colorScheme });
      // Evaluated by the debugger, which the page's own policy does not bind.
      await page.evaluate(source);
      const { violations, passes } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ['violations'] }));
      if (passes.length < 10) throw new Error(`axe has looked at hardly anything: ${passes.length} rules`);
      for (const { id, impact, help, nodes } of violations) {
        if (impact === 'serious' || impact === 'critical') {
          found.push({ colorScheme, id, impact, help, nodes: nodes.slice(0, 3).map(({ html, failureSummary }) => ({ html, failureSummary })) });
        }
      }
    }
    await page.emulateMedia({ colorScheme: 'light' });
    return found;
  },

  async elsewhere({ page: from, method, url }) {
    const other = await context.newPage();
    try {
      await other.goto(from);
      return await other.evaluate(async ([method_, url_]) => {
        const tried = [];
        for (const mode of ['cors', 'no-cors']) {
          const answer = fetch(url_, { method: method_, mode }).then((response) => `${response.type} ${response.status}`, (error) => String(error));
          tried.push(await answer);
        }
        return tried;
      }, [method, url]);
    } finally {
      await other.close();
    }
  },
};

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const told = JSON.parse(line);
    let answer;
    try {
      answer = { value: await words[told.do](told) ?? null };
    } catch (error) {
      answer = { error: error.message };
    }
    process.stdout.write(`${JSON.stringify(answer)}\n`);
  }
  await browser?.close();
}

main();
