// What the pipelines do, asked once a second while somebody looks. Everything that comes from outside is put in place as
// text, never as markup; what is on screen is changed and not made anew, so that focus and selection stay where they are.

const PERIOD = 1000; // ms between two questions
const LONGEST_PERIOD = 5000; // when nobody answers
const PATIENCE = 100_000; // ms for an order: longer than outboxd takes to say that it cannot

const $ = (selector, root = document) => root.querySelector(selector);
const count = new Intl.NumberFormat('en');
const rough = new Intl.NumberFormat('en', { maximumFractionDigits: 1 });

const STATES = {
  streaming: ['Streaming', 'good', '●'],
  starting: ['Starting', 'calm', '◌'],
  paused: ['Paused', 'calm', '❚❚'],
  'standing-by': ['Standing by', 'plain', '○'],
  retrying: ['Retrying', 'warn', '↻'],
  stopped: ['Stopped', 'plain', '■'],
  failed: ['Failed', 'bad', '✕'],
  'sink-away': ['Sink away', 'warn', '▲'],
  waiting: ['Waiting for acknowledgement', 'warn', '▲'],
};
const PLACES = {
  postgresql: 'PostgreSQL', mysql: 'MySQL', mongodb: 'MongoDB',
  kafka: 'Kafka', http: 'HTTP', rabbitmq: 'RabbitMQ', stdout: 'stdout', statistics: 'statistics',
};

// Figures for people.

const rate = (perSecond) => perSecond > 0 && perSecond < 10 ? rough.format(perSecond) : count.format(Math.round(perSecond));

function span(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  if (seconds < 0.001) return seconds === 0 ? '0 s' : '< 1 ms';
  if (seconds < 0.01) return `${rough.format(seconds * 1000)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${rough.format(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60 % 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds / 3600 % 24)} h`;
}

function bytes(number) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) [number, unit] = [number / 1024, unit + 1];
  return `${rough.format(number)} ${units[unit]}`;
}

const moment = (text) => new Date(text).toLocaleString('sv'); // 2026-11-16 18:00:00, in the zone of whoever looks

// The state that matters to people: a pipeline that streams to a sink that does not answer is in trouble.
function condition(one) {
  if (one.state !== 'streaming') return one.state;
  if (!one.sink_connected) return 'sink-away';
  return one.in_flight > 0 && one.idle_seconds >= 10 ? 'waiting' : 'streaming';
}

// Putting it on screen.

function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

function named(element, name) {
  if (element.getAttribute('aria-label') !== name) element.setAttribute('aria-label', name);
}

function badge(element, which) {
  if (element.dataset.is === which) return;
  const [word, look, sign] = STATES[which] ?? [which, 'plain', ''];
  const mark = document.createElement('span');
  mark.setAttribute('aria-hidden', 'true');
  mark.textContent = `${sign} `;
  element.className = `badge ${look}`;
  element.dataset.is = which;
  element.replaceChildren(mark, word);
}

function spark(svg, [...history], what) {
  history.pop(); // the second that is not over
  const highest = Math.max(1, ...history);
  const points = history.map((events, second) => `${second * 10},${(57 - 54 * events / highest).toFixed(1)}`);
  $('.line', svg).setAttribute('d', `M${points.join('L')}`);
  $('.area', svg).setAttribute('d', `M0,60L${points.join('L')}L580,60Z`);
  const peak = Math.max(...history);
  const label = `${what}: events a second over the last minute, at most ${count.format(peak)}`;
  named(svg, label);
  return peak;
}

let saying;
function say(what) {
  const place = $('#said');
  clearTimeout(saying);
  text(place, what);
  saying = setTimeout(() => text(place, ''), 12_000);
}

function template(id) {
  return $(id).content.firstElementChild.cloneNode(true);
}

// Asking outboxd.

class Refused extends Error {}

const token = {
  get: () => { try { return sessionStorage.getItem('outboxd-token'); } catch { return token.kept; } },
  set: (value) => { token.kept = value; try { sessionStorage.setItem('outboxd-token', value); } catch { /* kept here */ } },
};

async function ask(path, method = 'GET') {
  for (let wrong = false; ; wrong = true) {
    const headers = { Accept: 'application/json' };
    if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
    const response = await fetch(path, { method, headers, cache: 'no-store', signal: AbortSignal.timeout(PATIENCE) });
    const body = await response.text();
    const isJson = (response.headers.get('content-type') ?? '').startsWith('application/json');
    const answer = isJson ? JSON.parse(body) : body;
    if (response.ok) return answer;
    if (response.status !== 401) throw new Refused((answer.message ?? String(answer)).trim() || `status ${response.status}`);
    if (!await askForToken(wrong && token.get() !== null)) throw new Refused('nothing was done without the token');
  }
}

function askForToken(wrong) {
  const dialog = $('#token');
  const input = $('input', dialog);
  input.value = '';
  input.setCustomValidity('');
  text($('#token-title'), wrong ? 'That was not the admin token' : 'Admin token');
  return new Promise((resolve) => {
    $('form', dialog).onsubmit = (event) => {
      event.preventDefault();
      token.set(input.value);
      dialog.close('given');
    };
    dialog.onclose = () => resolve(dialog.returnValue === 'given');
    dialog.returnValue = '';
    dialog.showModal();
  });
}

// Does something once, however often the button is pressed, and says how it went.
async function act(button, done, what) {
  if (button.hasAttribute('aria-disabled')) return;
  button.setAttribute('aria-disabled', 'true');
  try {
    await what();
    say(done);
  } catch (error) {
    say(error instanceof Refused ? error.message : `outboxd does not answer: ${error.message}`);
  } finally {
    button.removeAttribute('aria-disabled');
    look();
  }
}

const at = (...parts) => parts.map(encodeURIComponent).join('/');

// What both pipelines and publishers show.
function figures(root, one) {
  const latency = one.latency ?? {};
  text($('[data-rate]', root), rate(one.events_per_second));
  text($('[data-p50]', root), span(latency.p50));
  text($('[data-p99]', root), span(latency.p99));
  text($('[data-in-flight]', root), count.format(one.in_flight));
  text($('[data-events]', root), count.format(one.events));
  text($('[data-dead-letters]', root), count.format(one.dead_letters));
  text($('[data-position]', root), one.position ?? '–');
  badge($('[data-badge]', root), condition(one));
  root.dataset.state = one.state;
}

function orderButton(button, one, name, path) {
  const word = one.state === 'paused' ? 'Resume' : one.state === 'failed' ? 'Restart' : 'Pause';
  text(button, word);
  named(button, `${word} ${name}`);
  button.className = word === 'Pause' ? 'quiet' : '';
  const ended = { Pause: 'is paused', Resume: 'goes on', Restart: 'begins anew' }[word];
  button.onclick = () => act(button, `${name} ${ended}.`, () => ask(`${path}/${word.toLowerCase()}`, 'POST'));
}

class Publisher {
  constructor(pipeline, name) {
    this.pipeline = pipeline;
    this.row = template('#publisher-row');
    this.row.dataset.publisher = name;
    text($('[data-name]', this.row), name);
  }

  update(one) {
    figures(this.row, one);
    text($('[data-lag]', this.row), span(one.lag_seconds));
    text($('[data-sink]', this.row), PLACES[one.sink] ?? one.sink);
    $('[data-holds]', this.row).hidden = !one.holds_back;
    spark($('.spark', this.row), one.history, one.name);
    orderButton($('[data-order]', this.row), one, `${this.pipeline}/${one.name}`,
      `pipelines/${at(this.pipeline, 'publishers', one.name)}`);
  }
}

class Pipeline {
  constructor(name) {
    this.name = name;
    this.path = `pipelines/${at(name)}`;
    this.publishers = new Map();
    const card = this.card = template('#pipeline-card');
    card.dataset.pipeline = name;
    const heading = $('h2', card);
    heading.id = `pipeline-${Pipeline.number = (Pipeline.number ?? 0) + 1}`;
    text(heading, name);
    card.setAttribute('aria-labelledby', heading.id);
    for (const [selector, what] of [['[data-publishers]', 'Publishers'], ['[data-letters] .scroll', 'Dead letters']]) {
      const region = $(selector, card);
      region.setAttribute('role', 'region');
      named(region, `${what} of ${name}`);
      region.tabIndex = 0;
    }
    const restart = $('[data-restart]', card);
    named(restart, `Restart ${name}`);
    restart.onclick = () => act(restart, `${name} begins anew.`, () => ask(`${this.path}/restart`, 'POST'));
    this.letters = new Letters(this);
  }

  update(one) {
    const { card } = this;
    figures(card, one);
    this.announce(condition(one));
    const sinks = [...new Set((one.publishers ?? [one]).map((publisher) => PLACES[publisher.sink] ?? publisher.sink))];
    text($('[data-way]', card), `${PLACES[one.source]} → ${sinks.join(', ')}`);
    const leader = $('[data-leader]', card);
    text(leader, one.leader ? 'Leader' : 'Not the leader');
    leader.title = one.leader ? 'This instance reads it' : 'Another instance reads it, or none';
    text($('[data-p90]', card), span(one.latency?.p90));
    text($('[data-lag]', card), span(one.lag_seconds));
    $('[data-log-behind]', card).hidden = one.lag_bytes === null || one.position === null;
    text($('[data-lag-bytes]', card), bytes(one.lag_bytes ?? 0));
    $('[data-kept-log]', card).hidden = !one.retained_bytes;
    text($('[data-retained]', card), bytes(one.retained_bytes));
    $('[data-pending]', card).hidden = one.outbox_depth === undefined;
    text($('[data-depth]', card), count.format(one.outbox_depth ?? 0));
    const peak = spark($('figure .spark', card), one.history, this.name);
    text($('[data-peak]', card), peak > 0 ? `at most ${count.format(peak)}` : '');
    this.trouble(one);
    this.errors(one);
    const order = $('[data-order]', card);
    orderButton(order, one, this.name, this.path);
    $('[data-restart]', card).hidden = order.textContent === 'Restart';
    const publishers = one.publishers ?? [];
    $('[data-publishers]', card).hidden = publishers.length === 0;
    keep(this.publishers, publishers, $('[data-publishers] tbody', card), (name) => new Publisher(this.name, name), 'row');
    this.letters.update(one);
  }

  announce(which) {
    if (this.was !== undefined && this.was !== which) say(`${this.name}: ${(STATES[which] ?? [which])[0].toLowerCase()}`);
    this.was = which;
  }

  trouble(one) {
    const place = $('[data-trouble]', this.card);
    const told = [one.last_error];
    for (const publisher of one.publishers ?? []) {
      if (publisher.last_error) told.push(`${publisher.name}: ${publisher.last_error}`);
    }
    if (one.held_back_by) told.push(`Held back by ${one.held_back_by}`);
    if (condition(one) === 'waiting') told.push(`Nothing was acknowledged for ${span(one.idle_seconds)}`);
    const what = told.filter(Boolean).join('\n');
    place.hidden = what === '';
    place.className = [one, ...one.publishers ?? []].some((any) => any.state === 'failed') ? 'trouble' : 'trouble warn';
    text(place, what);
  }

  errors(one) {
    const told = (one.publishers ?? []).flatMap((publisher) => publisher.errors.map((error) => ({ ...error, of: publisher.name })));
    const all = [...one.errors, ...told].sort((a, b) => b.at.localeCompare(a.at));
    const place = $('[data-errors]', this.card);
    place.hidden = all.length === 0;
    const known = JSON.stringify(all);
    if (this.knownErrors === known) return;
    this.knownErrors = known;
    text($('.count', place), `(${all.length})`);
    $('ol', place).replaceChildren(...all.map((error) => {
      const [item, when] = ['li', 'time'].map((name) => document.createElement(name));
      [when.dateTime, when.textContent] = [error.at, moment(error.at)];
      const times = error.times > 1 ? ` (${count.format(error.times)} times)` : '';
      item.append(when, ` ${error.of ? `${error.of}: ` : ''}${error.what}${times}`);
      return item;
    }));
  }
}

// Dead letters are asked for when somebody opens them, and again when there are more.
class Letters {
  constructor(pipeline) {
    this.pipeline = pipeline;
    this.place = $('[data-letters]', pipeline.card);
    this.place.ontoggle = () => { if (this.place.open) this.load(); };
    const again = $('[data-refresh]', this.place);
    named(again, `Look again for dead letters of ${pipeline.name}`);
    again.onclick = () => this.load();
  }

  update(one) {
    const places = [...new Set((one.publishers ?? [one]).map((publisher) => publisher.dead_letter).filter(Boolean))];
    this.place.hidden = places.length === 0;
    text($('[data-places]', this.place), places.length > 0 ? `in ${places.join(', ')}` : '');
    this.several = (one.publishers ?? []).length > 0;
    const more = this.counted !== undefined && one.dead_letters > this.counted;
    this.counted = one.dead_letters;
    if (more && this.place.open) this.load();
  }

  async load() {
    const note = $('[data-note]', this.place);
    const table = $('.scroll', this.place);
    if (table.hidden) text(note, 'Looking …');
    try {
      const { letters } = await ask(`${this.pipeline.path}/dead-letters`);
      text(note, letters.length === 0 ? 'There are none.' : '');
      table.hidden = letters.length === 0;
      $('tbody', table).replaceChildren(...letters.map((letter) => this.row(letter)));
    } catch (error) {
      table.hidden = true;
      text(note, `They cannot be shown: ${error.message}`);
    }
  }

  row(letter) {
    const row = template('#letter-row');
    row.dataset.letter = letter.id;
    const when = $('time', row);
    [when.dateTime, when.textContent] = [letter.failed_at, moment(letter.failed_at)];
    text($('[data-publisher]', row), letter.publisher);
    text($('[data-topic]', row), letter.topic ?? '–');
    text($('[data-key]', row), shown(letter.key));
    text($('[data-reason]', row), letter.reason);
    text($('[data-replayed]', row), letter.replayed_at ? moment(letter.replayed_at) : letter.replayed ? 'yes' : 'no');
    const [show, replay] = [$('[data-show]', row), $('[data-replay]', row)];
    named(show, `Show dead letter ${letter.id}`);
    named(replay, `Replay dead letter ${letter.id}`);
    replay.className = letter.replayed ? 'quiet' : '';
    show.onclick = () => this.show(show, letter);
    replay.onclick = () => this.replay(replay, letter);
    return row;
  }

  path(letter) {
    return `${this.pipeline.path}/dead-letters/${at(letter.id)}`;
  }

  replay(button, letter) {
    return act(button, `Dead letter ${letter.id} was delivered.`, async () => {
      await ask(`${this.path(letter)}/replay?publisher=${encodeURIComponent(letter.publisher)}`, 'POST');
      await this.load();
    });
  }

  async show(button, letter) {
    try {
      const whole = await ask(`${this.path(letter)}?publisher=${encodeURIComponent(letter.publisher)}`);
      this.open(whole);
    } catch (error) {
      say(error.message);
    }
  }

  open(letter) {
    const dialog = $('#letter');
    text($('#letter-title'), `Dead letter ${letter.id}`);
    text($('[data-reason]', dialog), letter.reason);
    facts($('[data-facts]', dialog), [
      ['Failed', moment(letter.failed_at)], ['Pipeline', letter.pipeline], ['Publisher', letter.publisher],
      ['Table', letter.source_table || '–'], ['Event id', letter.event_id ?? '–'], ['Topic', letter.topic ?? '–'],
      ['Key', shown(letter.key)], ['Position', letter.position], ['Attempts', count.format(letter.attempts)],
      ['Replayed', letter.replayed_at ? moment(letter.replayed_at) : letter.replayed ? 'yes' : 'no'],
    ]);
    facts($('[data-headers]', dialog), letter.headers.map(([name, value]) => [name, shown(value)]));
    const size = letter.value_bytes === null ? 'none' : bytes(letter.value_bytes);
    text($('[data-size]', dialog), letter.truncated ? `${size}, of which the beginning is shown` : size);
    text($('[data-payload]', dialog), letter.truncated ? shown(letter.value) : indented(shown(letter.value)));
    const replay = $('[data-replay]', dialog);
    replay.onclick = async () => { await this.replay(replay, letter); dialog.close(); };
    dialog.showModal();
    $('[data-close]', dialog).focus();
  }
}

function facts(list, pairs) {
  list.replaceChildren(...pairs.flatMap(([name, value]) => {
    const [term, what] = ['dt', 'dd'].map((element) => document.createElement(element));
    [term.textContent, what.textContent, what.className] = [name, value, 'mono'];
    return [term, what];
  }));
}

const shown = (value) => value === null || value === undefined ? '–' : typeof value === 'string' ? value : `base64:${value.base64}`;

// JSON on lines of its own. Numbers and strings stay as they are written: parsing would round the long ones.
function indented(json) {
  try { JSON.parse(json); } catch { return json; }
  let [out, depth, quoted] = ['', 0, false];
  const line = () => `\n${'  '.repeat(depth)}`;
  for (let index = 0; index < json.length; index += 1) {
    const sign = json[index];
    if (quoted) {
      out += sign === '\\' ? sign + json[index += 1] : sign;
      quoted = sign !== '"';
    } else if (sign === '"') [out, quoted] = [out + sign, true];
    else if (/\s/.test(sign)) continue;
    else if (sign === '{' || sign === '[') {
      const empty = /^\s*[}\]]/.exec(json.slice(index + 1, index + 40));
      if (empty) [out, index] = [out + sign + empty[0].trim(), index + empty[0].length];
      else { depth += 1; out += sign + line(); }
    } else if (sign === '}' || sign === ']') { depth -= 1; out += line() + sign; }
    else if (sign === ',') out += sign + line();
    else out += sign === ':' ? ': ' : sign;
  }
  return out;
}

// Keeps one thing on screen for each name, in order.
function keep(known, told, place, make, part) {
  for (const [name, one] of known) {
    if (!told.some((other) => other.name === name)) { one[part].remove(); known.delete(name); }
  }
  told.forEach((other, index) => {
    if (!known.has(other.name)) known.set(other.name, make(other.name));
    const one = known.get(other.name);
    if (place.children[index] !== one[part]) place.insertBefore(one[part], place.children[index] ?? null);
    one.update(other);
  });
}

// The page.

const pipelines = new Map();

function show(status) {
  text($('#instance'), `${status.version} at ${status.instance}`);
  keep(pipelines, status.pipelines, $('#pipelines'), (name) => new Pipeline(name), 'card');
  const all = $('#summary');
  all.hidden = false;
  const sum = (field) => status.pipelines.reduce((total, one) => total + one[field], 0);
  const well = status.pipelines.filter((one) => ['streaming', 'paused', 'standing-by'].includes(condition(one))).length;
  const number = status.pipelines.length;
  text($('[data-pipelines]', all), well === number ? count.format(number) : `${well} of ${number} well`);
  text($('[data-rate]', all), rate(sum('events_per_second')));
  text($('[data-lag]', all), span(Math.max(0, ...status.pipelines.map((one) => one.lag_seconds))));
  text($('[data-in-flight]', all), count.format(sum('in_flight')));
  text($('[data-dead-letters]', all), count.format(sum('dead_letters')));
  document.title = well === number ? 'outboxd' : `▲ ${number - well} in trouble – outboxd`;
}

function contact(lost) {
  const place = $('#contact');
  document.body.classList.toggle('lost-contact', lost !== null);
  place.className = lost === null ? 'contact live' : 'contact lost';
  text(place, lost === null ? 'Live' : `No answer since ${lost}`);
}

let period = PERIOD;
let next;
let asking = false;
let lost = null;

async function look() {
  clearTimeout(next);
  if (asking) return;
  if (document.hidden) return; // nobody looks: nothing is asked until somebody does
  asking = true;
  let status = null;
  try {
    const response = await fetch('status?history=true', { cache: 'no-store', signal: AbortSignal.timeout(10_000) });
    if (response.ok) status = await response.json();
  } catch { /* nobody answers, or in halves */ }
  asking = false;
  if (status === null) [period, lost] = [Math.min(period * 2, LONGEST_PERIOD), lost ?? moment(new Date())];
  else [period, lost] = [PERIOD, null];
  contact(lost);
  next = setTimeout(look, period);
  if (status !== null) show(status);
}

for (const button of document.querySelectorAll('dialog [data-close]')) button.onclick = () => button.closest('dialog').close('');
document.addEventListener('visibilitychange', () => { if (!document.hidden) look(); });
look();
