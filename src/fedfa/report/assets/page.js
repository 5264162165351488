'use strict';
// Draws a report's charts. No library; text always goes in as text, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const SVG = 'http://www.w3.org/2000/svg';
  const DASHES = ['', '6 3', '2 3', '9 3 2 3', '12 3', '1 5', '9 3 2 3 2 3', '4 1', '12 3 2 3', '6 6'];
  const HATCHES = [[], ['M0 6L6 0'], ['M0 3H6'], ['M0 0L6 6'], ['M3 0V6'], ['M2 3H4'], ['M0 6L6 0', 'M0 0L6 6'], ['M0 3H6', 'M3 0V6'],
    ['M1 1H3', 'M4 4H6'], ['M0 1H6', 'M0 5H6']];
  const COLOURS = 7; // of more methods, dashes and hatches tell apart those that have the same
  const MOST_BANDS = 5; // of more methods, bands would hide each other
  const MOST_SHOWN = 12; // at first
  const MINUS = '\u2212', NOTHING = '\u2013';

  // Small things

  const find = (selector, root = document) => root.querySelector(selector);
  const every = (selector, root = document) => [...root.querySelectorAll(selector)];

  function fill(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value === true ? '' : value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  }
  const html = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
  const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

  const colour = (place) => `c${place % COLOURS}`;
  const dash = (place) => DASHES[Math.floor(place / COLOURS) % DASHES.length];
  const number = (value, digits = 1) => (value === null || value === undefined ? NOTHING
    : value.toFixed(digits).replace('-', MINUS));
  const signed = (value, digits = 1) => (value === null || value === undefined ? NOTHING
    : (Number(value.toFixed(digits)) > 0 ? '+' : '') + number(Number(value.toFixed(digits)) || 0, digits));
  const digits4 = (value) => (Math.abs(value) < 1e-4 && value ? value.toExponential(1) : String(Number(value.toPrecision(4)))).replace(/-/g, MINUS);
  const range = (low, high, show = number) => (low === null || low === undefined ? '' : `${show(low)} to ${show(high)}`);
  const pvalue = (p) => (p === null || p === undefined ? NOTHING : p < 0.001 ? '<0.001' : p.toFixed(3));

  function ticks(low, high, most) {
    const span = high - low || Math.abs(high) || 1;
    const rough = span / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
    return { found, show: (value) => number(value, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))) };
  }

  const level = (place) => Math.floor(place / COLOURS) % HATCHES.length;
  const hatch = (place) => (level(place) ? `url(#hatch-${level(place)})` : null);
  document.body.append(svg('svg', { width: 0, height: 0, 'aria-hidden': 'true', style: 'position:absolute' }, svg('defs', {},
    HATCHES.map((strokes, at) => svg('pattern', { id: `hatch-${at}`, width: 6, height: 6, patternUnits: 'userSpaceOnUse' },
      strokes.map((d) => svg('path', { d, class: 'hatch' })))))));

  function legendMark(place) {
    const over = hatch(place);
    return svg('svg', { width: over ? 36 : 22, height: 10, 'aria-hidden': 'true', class: colour(place) },
      svg('line', { x1: 1, y1: 5, x2: 21, y2: 5, class: 'curve', 'stroke-dasharray': dash(place) }),
      over ? [svg('rect', { class: 'column', x: 25, width: 11, height: 10 }), svg('rect', { x: 25, width: 11, height: 10, fill: over })] : null);
  }

  // A chart: a place that is drawn when it is first seen and again when its width changes; stops that a pointer or the
  // arrow keys go to, each read out; and its numbers as a table.

  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) { seen.unobserve(target); target.show(); }
  }, { rootMargin: '400px' });
  // On paper everything is as wide as a page, and a table that is wider is made smaller.
  const printing = (on) => {
    document.documentElement.classList.toggle('paper', on);
    every('.plot').forEach((plot) => { if (plot.clientWidth) plot.show(); });
    every('.scroll > table').forEach((made) => { made.style.zoom = on ? Math.min(1, made.parentNode.clientWidth / made.offsetWidth) : ''; });
  };
  addEventListener('beforeprint', () => printing(true));
  addEventListener('afterprint', () => printing(false));
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) if (target.seen && Math.abs(target.clientWidth - (target.drawn || 0)) > 1) target.show();
  });

  function chart(box, draw, tabulate) {
    const plot = find('.plot', box);
    const live = html('p', { class: 'hidden', 'aria-live': 'polite' });
    box.append(live);
    const details = html('details', { class: 'data' }, html('summary', {}, 'Numbers as a table'));
    const holder = html('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'Numbers of the chart' });
    details.append(holder);
    const write = () => { if (details.open) holder.replaceChildren(tabulate()); };
    details.addEventListener('toggle', write);
    box.append(details);
    plot.show = () => {
      plot.seen = true;
      plot.drawn = plot.clientWidth;
      if (!plot.drawn) return; // not laid out yet: it is drawn when it is
      plot.replaceChildren();
      const stops = draw(plot, plot.clientWidth) || [];
      interact(plot, live, stops);
      write();
    };
    seen.observe(plot);
    resized.observe(plot);
    return () => { if (plot.drawn) plot.show(); };
  }

  function interact(plot, live, stops) {
    const picture = find('svg, .stack', plot);
    let at = -1;
    const go = (to, speak) => {
      at = Math.max(0, Math.min(stops.length - 1, to));
      const stop = stops[at];
      if (!stop) return;
      every('.mark, .tip', plot).forEach((node) => node.remove());
      if (stop.mark) stop.mark();
      const tip = html('div', { class: 'tip' }, html('b', {}, stop.title),
        stop.rows.map(([place, name, value]) => html('div', {},
          place === null ? null : legendMark(place), html('span', {}, name), html('em', { style: 'font-style:normal' }, value))));
      plot.append(tip);
      const left = stop.x + 14 + tip.offsetWidth > plot.scrollLeft + plot.clientWidth
        ? Math.max(plot.scrollLeft, stop.x - 14 - tip.offsetWidth) : stop.x + 14;
      tip.style.left = `${left}px`;
      tip.style.top = `${Math.max(0, Math.min(stop.y ?? 8, plot.clientHeight - tip.offsetHeight))}px`;
      if (speak) {
        live.textContent = `${stop.title}: ${stop.rows.map(([, name, value]) => `${name} ${value}`).join(', ')}`;
        if (stop.x < plot.scrollLeft || stop.x > plot.scrollLeft + plot.clientWidth) plot.scrollLeft = stop.x - plot.clientWidth / 2;
      }
    };
    const leave = () => { at = -1; every('.mark, .tip', plot).forEach((node) => node.remove()); };
    const nearest = (event) => {
      const from = picture.getBoundingClientRect();
      const x = event.clientX - from.left, y = event.clientY - from.top;
      let best = -1, least = Infinity;
      stops.forEach((stop, place) => {
        const far = stop.far ? stop.far(x, y) : (stop.y === undefined ? Math.abs(stop.x - x) : Math.hypot(stop.x - x, stop.y - y));
        if (far < least) { least = far; best = place; }
      });
      if (best >= 0 && best !== at) go(best, false);
    };
    plot.onpointermove = nearest;
    plot.onpointerdown = nearest;
    plot.onpointerleave = (event) => { if (event.pointerType !== 'touch') leave(); }; // a lifted finger still wants to read
    plot.onblur = leave;
    plot.onkeydown = (event) => {
      const width = stops.across || 1;
      const to = {
        ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + width, ArrowUp: at - width, Home: 0, End: stops.length - 1,
      }[event.key];
      if (event.key === 'Escape') leave();
      if (to === undefined || !stops.length) return;
      event.preventDefault();
      go(at < 0 && event.key !== 'End' ? 0 : to, true);
    };
  }

  function table(caption, head, rows, attributes = {}) {
    return html('table', attributes, html('caption', {}, html('span', {}, caption)),
      html('thead', {}, html('tr', {}, head.map((title, place) => html('th', { scope: 'col', class: place ? 'number' : null }, title)))),
      html('tbody', {}, rows.map((row) => html('tr', {}, row.map((cell, place) => (place
        ? html('td', { class: 'number' }, cell) : html('th', { scope: 'row' }, cell)))))));
  }

  let fields = 0;
  function select(holder, title, options, change) {
    const id = `field-${fields += 1}`;
    const box = html('select', { id, onchange: () => change(box.value) },
      options.map(([value, text]) => html('option', { value }, text)));
    holder.append(html('div', { class: 'field' }, html('label', { for: id }, title), box));
    return box;
  }

  // Lines, with bands

  function lines(plot, width, lineup, { across, up, integer, mark }) {
    const known = lineup.filter((one) => one.x.length);
    if (!known.length) { plot.append(html('p', { class: 'note' }, 'Nothing to draw: choose a method above.')); return []; }
    const height = Math.max(230, Math.min(400, width * 0.46));
    const all = known.flatMap((one) => [one.y, one.low || [], one.high || [], ...(one.each || [])].flat());
    let low = Math.min(...all), high = Math.max(...all);
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    low -= pad; high += pad;
    const first = Math.min(...known.map((one) => one.x[0])), last = Math.max(...known.map((one) => one.x[one.x.length - 1]));
    const vertical = ticks(low, high, height / 44), horizontal = ticks(first, last, Math.min(8, width / 64));
    const left = 16 + 7 * Math.max(...vertical.found.map((value) => vertical.show(value).length)), right = 12, top = 24, bottom = 40;
    const x = (value) => left + (last === first ? 0.5 : (value - first) / (last - first)) * (width - left - right);
    const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
    const picture = svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' });
    for (const value of vertical.found) picture.append(
      svg('line', { class: 'axis', x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      svg('text', { x: left - 7, y: y(value) + 4, 'text-anchor': 'end' }, vertical.show(value)));
    for (const value of horizontal.found) if (!integer || Number.isInteger(value)) picture.append(
      svg('text', { x: x(value), y: height - bottom + 18, 'text-anchor': 'middle' }, integer ? String(value) : horizontal.show(value)));
    picture.append(
      svg('text', { x: 0, y: 12 }, up),
      svg('text', { x: width - right, y: height - 4, 'text-anchor': 'end' }, across));
    const path = (xs, ys) => xs.map((value, place) => `${place ? 'L' : 'M'}${x(value).toFixed(1)} ${y(ys[place]).toFixed(1)}`).join('');
    for (const one of known) {
      const group = svg('g', { class: `series ${colour(one.place)}`, 'data-series': one.name });
      if (one.low) group.append(svg('path', { class: 'band',
        d: `${path(one.x, one.high)}${path([...one.x].reverse(), [...one.low].reverse()).replace('M', 'L')}Z` }));
      for (const ys of one.each || []) group.append(svg('path', { class: 'curve thin', d: path(one.x, ys) }));
      group.append(svg('path', { class: 'curve', d: path(one.x, one.y), 'stroke-dasharray': dash(one.place) }));
      if (one.x.length < 3) one.x.forEach((value, place) => group.append(
        svg('circle', { class: 'dot', r: 4, cx: x(value), cy: y(one.y[place]) })));
      picture.append(group);
    }
    plot.append(picture);
    const xs = [...new Set(known.flatMap((one) => one.x))].sort((a, b) => a - b);
    return xs.map((value) => {
      const here = known.map((one) => [one, one.x.indexOf(value)]).filter(([, place]) => place >= 0)
        .sort(([a, i], [b, j]) => b.y[j] - a.y[i]);
      return {
        x: x(value), title: mark(value),
        rows: here.map(([one, place]) => [one.place, one.name,
          one.show(one.y[place]) + (one.low ? ` (${one.show(one.low[place])} to ${one.show(one.high[place])})` : '')]),
        mark: () => picture.append(svg('g', { class: 'mark' },
          svg('line', { class: 'cross', x1: x(value), x2: x(value), y1: top, y2: height - bottom }),
          here.map(([one, place]) => svg('circle', { class: `dot ${colour(one.place)}`, r: 4.5, cx: x(value), cy: y(one.y[place]) })))),
      };
    });
  }

  // Of more methods than a chart can hold, those that are not shown at first

  function lowest(own) {
    const means = Object.values(own.bars)[0]?.[own.whos[0][0]] || [];
    const order = own.series.map((_, place) => place).sort((a, b) => (means[b]?.[0] ?? -1) - (means[a]?.[0] ?? -1));
    return order.slice(MOST_SHOWN).filter((place) => !own.baselines.includes(place));
  }

  // A panel: the series of one federation, and which of them are shown

  function panel(section, own) {
    const hidden = new Set(own.series.length > MOST_SHOWN ? lowest(own) : []);
    const redraws = [];
    const redraw = () => redraws.forEach((again) => again());
    const shown = () => own.series.map((_, place) => place).filter((place) => !hidden.has(place));

    for (const box of every('.legend', section)) {
      const chips = own.series.map((series, place) => {
        const input = html('input', { type: 'checkbox', checked: !hidden.has(place), onchange: () => {
          if (input.checked) hidden.delete(place); else hidden.add(place);
          redraw();
        } });
        return html('label', { class: `chip ${colour(place)}` }, input, legendMark(place), html('span', {}, series.label));
      });
      box.append(...chips);
      if (hidden.size) find('legend', box).append(`; at first the ${MOST_SHOWN} with the highest means, and what they are compared with`);
      if (own.series.length > 6) {
        const search = html('input', { type: 'search', placeholder: 'Filter methods', 'aria-label': 'Filter methods by name',
          oninput: () => {
            own.series.forEach((series, place) => {
              const on = series.label.toLowerCase().includes(search.value.trim().toLowerCase());
              find('input', chips[place]).checked = on;
              if (on) hidden.delete(place); else hidden.add(place);
            });
            redraw();
          } });
        box.append(search);
      }
    }
    const rule = find('.rule', section);
    const ruled = () => (rule ? rule.value : Object.keys(own.bars)[0]);
    if (rule) rule.addEventListener('change', () => {
      every('[data-rule]', section).forEach((node) => { node.hidden = node.dataset.rule !== rule.value; });
      redraw();
    });
    for (const [name, make] of Object.entries({ curves, bars, differences, labels, looks, histogram, apart, traces })) {
      const box = find(`[data-chart="${name}"]`, section);
      if (box) redraws.push(...[make(box, own, { shown, ruled })].flat());
    }
  }

  // Convergence

  function curves(box, own, { shown }) {
    const controls = find('.controls', box);
    const has = (split) => own.series.some((series) => Object.keys(series.curves).some((key) => key.startsWith(`${split}/`)));
    const bands = own.series.some((series) => series.seeds.length > 1);
    let again = () => {};
    const what = select(controls, 'What', [['test', `test ${own.metric}`], ['val', `validation ${own.metric}`], ['loss', 'training loss']]
      .filter(([split]) => has(split)), () => { who.disabled = what.value === 'loss'; again(); });
    const who = select(controls, 'Client', own.whos, () => again());
    const band = select(controls, 'Band over seeds', bands
      ? [['half', '95 % interval'], ['sd', 'standard deviation'], ['each', 'every seed'], ['none', 'none']] : [['none', 'none: one seed']], () => again());
    if (own.series.length > MOST_BANDS) band.value = 'none';
    const part = select(controls, 'Rounds', [['1', 'all'], ['2', 'second half'], ['4', 'last quarter']], () => again());
    const late = (curve) => {
      const last = curve.x[curve.x.length - 1], from = curve.x.findIndex((round) => round > last - last / part.value);
      const cut = (list) => (list ? list.slice(from) : list);
      return { ...curve, x: cut(curve.x), y: cut(curve.y), sd: cut(curve.sd), each: curve.each ? curve.each.map(cut) : null };
    };
    const lineup = () => shown().map((place) => {
      const series = own.series[place];
      const key = what.value === 'loss' ? 'loss/mean' : `${what.value}/${who.value}`;
      if (!series.curves[key]) return { name: series.label, place, x: [], y: [] };
      const curve = late(series.curves[key]);
      const digits = what.value === 'loss' ? 3 : 1;
      const width = curve.sd && { half: curve.half, sd: 1 }[band.value];
      const [floor, ceiling] = what.value === 'loss' ? [0, Infinity] : [0, 100];
      return {
        name: series.label, place, x: curve.x, y: curve.y, show: (value) => number(value, digits),
        low: width ? curve.y.map((value, at) => Math.max(floor, value - width * curve.sd[at])) : null,
        high: width ? curve.y.map((value, at) => Math.min(ceiling, value + width * curve.sd[at])) : null,
        each: band.value === 'each' ? curve.each : null,
      };
    });
    const title = () => (what.value === 'loss' ? 'training loss' : `${what.value === 'test' ? 'test' : 'validation'} ${own.metric}, %`);
    again = chart(box, (plot, width) => lines(plot, width, lineup(), {
      across: 'round', up: title(), integer: true, mark: (value) => `Round ${value}`,
    }), () => {
      const known = lineup().filter((one) => one.x.length);
      const rounds = [...new Set(known.flatMap((one) => one.x))].sort((a, b) => a - b);
      return table(`${title()} by round`, ['round', ...known.map((one) => one.name)], rounds.map((round) => [String(round),
        ...known.map((one) => (one.x.includes(round) ? one.show(one.y[one.x.indexOf(round)]) : NOTHING))]));
    });
    return again;
  }

  // Clients

  function bars(box, own, { shown, ruled }) {
    const value = (who, place) => own.bars[ruled()][who][place];
    const whos = [...own.whos.slice(1), own.whos[0]];
    const cell = (found) => (found ? number(found[0]) + (found[1] === null ? '' : ` (${range(found[1], found[2])})`) : NOTHING);
    let again = () => {};
    const scale = select(find('.controls', box), 'Scale', [['bars', 'bars from 0'], ['dots', 'dots, close up']], () => again());
    again = chart(box, (plot, space) => {
      const close = scale.value === 'dots';
      const places = shown(), height = 270, left = 34, top = 14, bottom = 30, gap = 18;
      const bar = Math.max(7, Math.min(34, ((space - left) / whos.length - gap) / Math.max(places.length, 1)));
      const each = Math.max(places.length * bar + 10, 52), width = Math.max(space, left + whos.length * each + 4);
      const step = (width - left - 4) / whos.length;
      const all = whos.flatMap(([who]) => places.map((place) => value(who, place))).filter(Boolean).flat().filter((one) => one !== null);
      const [low, high] = close && all.length ? [Math.max(0, Math.min(...all) - 0.5), Math.min(100, Math.max(...all) + 0.5)] : [0, 100];
      const y = (share) => top + (1 - (Math.max(low, Math.min(share, high)) - low) / (high - low)) * (height - top - bottom);
      const picture = svg('svg', { width, height, 'aria-hidden': 'true' });
      for (const share of close ? ticks(low, high, 5).found : [0, 25, 50, 75, 100]) picture.append(
        svg('line', { class: 'axis', x1: left, x2: width, y1: y(share), y2: y(share) }),
        svg('text', { x: left - 6, y: y(share) + 4, 'text-anchor': 'end' }, String(Number(share.toPrecision(4)))));
      const stops = whos.map(([who, title], at) => {
        const middle = left + (at + 0.5) * step, start = middle - places.length * bar / 2;
        places.forEach((place, rank) => {
          const found = value(who, place);
          if (!found) return;
          const x = start + rank * bar, centre = x + bar / 2 - 0.5;
          const line = found[1] === null ? null
            : svg('line', { class: close ? 'whisker own' : 'whisker', x1: centre, x2: centre, y1: y(found[1]), y2: y(found[2]) });
          const body = close ? svg('circle', { class: 'dot', r: 4.5, cx: centre, cy: y(found[0]) })
            : svg('rect', { class: 'column', x, width: bar - 2, y: y(found[0]), height: y(0) - y(found[0]), rx: Math.min(3, bar / 4) });
          const over = close ? null : hatch(place);
          const hatched = over ? svg('rect', { x, width: bar - 2, y: y(found[0]), height: y(0) - y(found[0]), fill: over }) : null;
          picture.append(svg('g', { class: colour(place), 'data-series': own.series[place].label }, close ? [line, body] : [body, hatched, line]));
        });
        const short = who === 'unseen' ? 'unseen' : who === 'mean' ? (own.whos[0][0] === 'unseen' ? 'seen' : 'mean') : title;
        const most = Math.max(4, Math.floor(step / 6.8));
        picture.append(svg('text', { class: 'name', x: middle, y: height - bottom + 18, 'text-anchor': 'middle' },
          short.length > most ? `${short.slice(0, most - 1)}\u2026` : short));
        return {
          x: middle, title, rows: places.map((place) => [place, own.series[place].label, cell(value(who, place))]),
          mark: () => picture.append(svg('rect', { class: 'mark picked', x: middle - step / 2 + 2, width: step - 4, y: 4, height: height - 6, rx: 6 })),
        };
      });
      plot.append(picture);
      return stops;
    }, () => table(`Test ${own.metric}, %, ${data.rules[ruled()]}, with 95 % intervals over seeds`,
      ['method', ...whos.map(([, title]) => title)],
      shown().map((place) => [own.series[place].label, ...whos.map(([who]) => cell(value(who, place)))])));
    return again;
  }

  // Paired differences

  function differences(box, own, { shown, ruled }) {
    let again = () => {};
    const there = Object.values(own.differences)[0] || {}, several = 'own' in there;
    const known = Object.keys(there).filter((place) => place !== 'own').map(Number).sort((a, b) => a - b);
    const titles = new Map([...(several ? [['own', own.base]] : []), ...known.map((place) => [String(place), own.series[place].label])]);
    const against = select(find('.controls', box), 'Against', [...titles], () => again());
    against.value = several ? 'own' : own.baselines[0];
    const rows = () => (own.differences[ruled()][against.value] || []).filter(([place]) => shown().includes(place));
    const text = ([, seeds, mean, low, high, p, holm]) => [signed(mean), range(low, high, signed) || NOTHING, pvalue(p), pvalue(holm), String(seeds)];
    again = chart(box, (plot, width) => {
      const found = rows();
      if (!found.length) { plot.append(html('p', { class: 'note' }, 'Nothing to compare: no seeds in common, or runs that are not complete.')); return []; }
      const row = 40, top = 8, bottom = 40, height = top + bottom + row * found.length, left = 10, right = 14;
      const all = found.flatMap(([, , mean, low, high]) => [mean, low ?? mean, high ?? mean, 0]);
      const pad = (Math.max(...all) - Math.min(...all) || 1) * 0.06, least = Math.min(...all) - pad, most = Math.max(...all) + pad;
      const x = (value) => left + (value - least) / (most - least) * (width - left - right);
      const picture = svg('svg', { width, height, 'aria-hidden': 'true' });
      const scale = ticks(least, most, width / 80);
      for (const value of scale.found) picture.append(
        svg('line', { class: value === 0 ? 'zero' : 'axis', x1: x(value), x2: x(value), y1: top, y2: height - bottom }),
        svg('text', { x: x(value), y: height - bottom + 16, 'text-anchor': 'middle' }, signed(value, Math.min(2, (scale.show(value).split('.')[1] || '').length))));
      picture.append(svg('line', { class: 'zero', x1: x(0), x2: x(0), y1: top, y2: height - bottom }),
        svg('text', { x: width - right, y: height - 4, 'text-anchor': 'end' }, `points of ${own.metric}`));
      const stops = found.map((one, at) => {
        const [place, , mean, low, high] = one, y = top + row * at + 27, label = own.series[place].label;
        const group = svg('g', { class: colour(place), 'data-series': label });
        group.append(svg('text', { class: 'name', x: left, y: y - 12 }, label.length > width / 7.2 ? `${label.slice(0, Math.floor(width / 7.2) - 1)}\u2026` : label));
        if (low !== null) group.append(svg('line', { class: 'whisker own', x1: x(low), x2: x(high), y1: y, y2: y }));
        group.append(svg('circle', { class: 'dot', r: 5, cx: x(mean), cy: y }));
        picture.append(group);
        const [shift, interval, p, holm, seeds] = text(one);
        return {
          x: x(mean), y, far: (_, pointer) => Math.abs(pointer - y + 8), title: label,
          rows: [['difference', shift], ['95 % interval', interval], ['p (Holm)', holm], ['p', p], ['seeds', seeds]].map((row) => [null, ...row]),
          mark: () => picture.append(svg('circle', { class: 'mark picked', r: 8, cx: x(mean), cy: y })),
        };
      });
      plot.append(picture);
      return stops;
    }, () => table(`Differences to ${titles.get(against.value)}, points of test ${own.metric}, ${data.rules[ruled()]}, paired by seed`,
      ['method', 'difference', '95 % interval', 'p', 'p (Holm)', 'seeds'], rows().map((one) => [own.series[one[0]].label, ...text(one)])));
    return again;
  }

  // The federation

  function heat(caption, corner, columns, rows, values, { show, share }) {
    const made = table(caption, [corner, ...columns], rows.map((row, r) => [row, ...columns.map((_, c) => show(values[r][c], r, c))]), { class: 'heat' });
    every('tbody tr', made).forEach((line, r) => every('td', line).forEach((cell, c) => cell.style.setProperty('--v', share(values[r][c], r, c))));
    return made;
  }

  function labels(box, own) {
    const found = own.federation, counts = found.task === 'classification';
    const sides = { all: 'all samples', train: 'training', val: 'validation', test: 'test' };
    const holder = find('.scroll', box);
    const values = (side) => (side !== 'all' ? found.labels[side] : found.clients.map((_, client) => found.classes.map((__, kind) => (
      ['train', 'val', 'test'].reduce((sum, one) => sum + found.labels[one][client][kind], 0)))));
    const draw = (side) => {
      const shownValues = values(side), sums = shownValues.map((row) => row.reduce((a, b) => a + b, 0) || 1);
      const most = Math.max(...shownValues.flatMap((row, r) => row.map((value) => value / sums[r])), 2 / found.classes.length);
      const made = heat(
        counts ? `Images of each class, ${sides[side]}; the shade is the share of the client's images. Last: training, validation and test samples.`
          : `Share of pixels of each class, %, ${sides[side]}. Last: training, validation and test images.`,
        'client', found.classes, found.clients, shownValues, {
          show: (value) => (counts ? String(value) : number(100 * value, 1)),
          share: (value, r) => (value / sums[r] / most).toFixed(3),
        });
      find('thead tr', made).append(html('th', { scope: 'col' }, 'samples'));
      every('tbody tr', made).forEach((row, place) => row.append(html('td', { class: 'plain' }, found.samples[place].join('/'))));
      holder.replaceChildren(made);
    };
    const box2 = select(find('.controls', box), 'Samples', Object.entries(sides).filter(([side]) => counts || side !== 'all'), draw);
    draw(box2.value);
    return [];
  }

  function looks(box, own) {
    const found = own.federation;
    let again = () => {};
    const channel = select(find('.controls', box), 'Channel', found.channels.map((name, place) => [place, name]), () => again());
    const dots = () => found.clients.map((name, place) => {
      const at = channel.value, [mean, std] = [found.mean[place], found.std[place]];
      return { name, place, x: mean.mean[at], dx: mean.sd[at], y: std.mean[at], dy: std.sd[at] };
    }).filter((dot) => dot.x !== null);
    const tone = (place) => (found.clients.length <= COLOURS ? colour(place) : colour(0));
    again = chart(box, (plot, width) => {
      const all = dots(), height = Math.max(240, Math.min(360, width * 0.62)), left = 44, right = 12, top = 22, bottom = 40;
      const span = (low, high) => [low - (high - low || 0.1) * 0.08, high + (high - low || 0.1) * 0.08];
      const [x0, x1] = span(Math.min(...all.map((d) => d.x - d.dx)), Math.max(...all.map((d) => d.x + d.dx)));
      const [y0, y1] = span(Math.min(...all.map((d) => d.y - d.dy)), Math.max(...all.map((d) => d.y + d.dy)));
      const x = (value) => left + (value - x0) / (x1 - x0) * (width - left - right);
      const y = (value) => top + (1 - (value - y0) / (y1 - y0)) * (height - top - bottom);
      const picture = svg('svg', { width, height, 'aria-hidden': 'true' });
      const over = ticks(x0, x1, width / 80), up = ticks(y0, y1, height / 60);
      over.found.forEach((value) => picture.append(svg('line', { class: 'axis', x1: x(value), x2: x(value), y1: top, y2: height - bottom }),
        svg('text', { x: x(value), y: height - bottom + 17, 'text-anchor': 'middle' }, over.show(value))));
      up.found.forEach((value) => picture.append(svg('line', { class: 'axis', x1: left, x2: width - right, y1: y(value), y2: y(value) }),
        svg('text', { x: left - 6, y: y(value) + 4, 'text-anchor': 'end' }, up.show(value))));
      picture.append(svg('text', { x: 0, y: 12 }, 'contrast (sd of pixels)'),
        svg('text', { x: width - right, y: height - 4, 'text-anchor': 'end' }, 'brightness (mean of pixels, 0 to 1)'));
      const stops = all.map((dot) => {
        picture.append(svg('g', { class: tone(dot.place) },
          svg('line', { class: 'whisker own', x1: x(dot.x - dot.dx), x2: x(dot.x + dot.dx), y1: y(dot.y), y2: y(dot.y), opacity: 0.5 }),
          svg('line', { class: 'whisker own', x1: x(dot.x), x2: x(dot.x), y1: y(dot.y - dot.dy), y2: y(dot.y + dot.dy), opacity: 0.5 }),
          svg('circle', { class: 'dot', r: 6, cx: x(dot.x), cy: y(dot.y) }),
          found.clients.length <= 12 ? svg('text', x(dot.x) + 12 + 7.5 * dot.name.length > width
            ? { class: 'name', x: x(dot.x) - 9, y: y(dot.y) - 8, 'text-anchor': 'end' }
            : { class: 'name', x: x(dot.x) + 9, y: y(dot.y) - 8 }, dot.name) : null));
        return {
          x: x(dot.x), y: y(dot.y), title: dot.name,
          rows: [[null, 'brightness', `${number(dot.x, 3)} ± ${number(dot.dx, 3)}`], [null, 'contrast', `${number(dot.y, 3)} ± ${number(dot.dy, 3)}`]],
          mark: () => picture.append(svg('circle', { class: 'mark picked', r: 10, cx: x(dot.x), cy: y(dot.y) })),
        };
      });
      plot.append(picture);
      return stops;
    }, () => table(`Brightness and contrast of the images, ${found.channels[channel.value]}: mean and standard deviation over images`,
      ['client', 'brightness', 'sd', 'contrast', 'sd'], dots().map((dot) => [dot.name, ...[dot.x, dot.dx, dot.y, dot.dy].map((value) => number(value, 3))])));
    return [];
  }

  function histogram(box, own) {
    const found = own.federation, bins = found.histogram[0][0].length;
    let again = () => {};
    const channel = select(find('.controls', box), 'Channel', found.channels.map((name, place) => [place, name]), () => again());
    find('.plot', box).before(html('ul', { class: 'key' }, found.clients.slice(0, COLOURS).map((name, place) => html('li', {}, legendMark(place), name))));
    const middles = [...Array(bins).keys()].map((bin) => Math.round(1000 * (bin + 0.5) / bins) / 1000);
    const lineup = () => found.clients.slice(0, COLOURS).map((name, place) => ({
      name, place, x: middles, y: found.histogram[place][channel.value].map((share) => 100 * share), show: (value) => `${number(value, 1)} %`,
    }));
    again = chart(box, (plot, width) => lines(plot, width, lineup(), {
      across: 'intensity, 0 to 1', up: 'share of pixels, %', mark: (value) => `Intensity ${number(value, 2)}`,
    }), () => table(`Share of pixels by intensity, %, ${found.channels[channel.value]}`, ['intensity', ...lineup().map((one) => one.name)],
      middles.map((middle, bin) => [number(middle, 2), ...lineup().map((one) => number(one.y[bin], 1))])));
    return [];
  }

  function apart(box, own) {
    const { apart: names, distances } = own.federation;
    const most = Math.max(1, ...distances.flat().filter((value) => value !== null));
    find('.scroll', box).replaceChildren(heat(
      'Distance between clients in brightness and contrast. At 1, clients differ as images of one client do.',
      'client', names, names, distances, { show: (value) => number(value, 1), share: (value) => ((value || 0) / most).toFixed(3) }));
    return [];
  }

  // How γ and the running statistics moved

  const CIVIDIS = [[0, 32, 77], [43, 68, 110], [87, 93, 109], [124, 123, 120], [165, 156, 116], [210, 193, 92], [255, 234, 70]];
  function ramp(share) {
    const at = share * (CIVIDIS.length - 1), from = Math.min(Math.floor(at), CIVIDIS.length - 2);
    return CIVIDIS[from].map((value, part) => value + (CIVIDIS[from + 1][part] - value) * (at - from));
  }

  function traces(box, own) {
    const controls = find('.controls', box), [left, right] = every('.half', box);
    let agains = [];
    const again = () => agains.forEach((one) => one());
    const run = select(controls, 'Run', own.traces.map((one, place) => [place, `${one.label}, seed ${one.seed}`]), () => { fillFields(); again(); });
    const layer = select(controls, 'Layer', [], () => again());
    const statistic = select(controls, 'Statistic', [], () => again());
    const order = select(controls, 'Channels', [['index', 'in their order'], ['last', 'by the last round']], () => again());
    const fillFields = () => {
      const titles = Object.values(own.traces[run.value].titles);
      for (const [node, part] of [[layer, 0], [statistic, 1]]) {
        const kept = node.value, names = [...new Set(titles.map((title) => title[part]))];
        node.replaceChildren(...names.map((name) => html('option', { value: name }, name)));
        if (names.includes(kept)) node.value = kept;
      }
    };
    fillFields();
    const field = () => {
      const one = own.traces[run.value];
      const key = Object.keys(one.titles).find((name) => one.titles[name][0] === layer.value && one.titles[name][1] === statistic.value);
      if (!key) return null;
      const found = one.fields[key];
      const raw = Uint8Array.from(atob(found.bytes), (sign) => sign.charCodeAt(0)), across = one.rounds.length;
      let rows = [...Array(raw.length / across).keys()];
      if (order.value === 'last') rows = rows.sort((a, b) => raw[(b + 1) * across - 1] - raw[(a + 1) * across - 1]);
      const value = (row, column) => found.low + raw[row * across + column] / 255 * (found.high - found.low);
      return { ...found, rounds: one.rounds, rows, raw, across, value, channel: (row) => (found.channels ? found.channels[row] : row) };
    };
    agains.push(chart(left, (plot, width) => {
      const found = field();
      if (!found) { plot.append(html('p', { class: 'note' }, 'This layer has no such statistic.')); return []; }
      const { rounds, rows, across } = found, edge = 34, bottom = 22;
      const tall = Math.max(120, Math.min(340, rows.length * 14)), wide = width - edge - 4;
      const canvas = html('canvas', { width: across, height: rows.length, style:
        `position:absolute;left:${edge}px;top:4px;width:${wide}px;height:${tall}px;image-rendering:pixelated;border-radius:4px` });
      const pen = canvas.getContext('2d'), image = pen.createImageData(across, rows.length);
      rows.forEach((row, y) => { for (let x = 0; x < across; x += 1) {
        const [r, g, b] = ramp(found.raw[row * across + x] / 255);
        image.data.set([r, g, b, 255], 4 * (y * across + x));
      } });
      pen.putImageData(image, 0, 0);
      const height = tall + bottom + 6, picture = svg('svg', { width, height, 'aria-hidden': 'true', style: 'position:absolute;left:0;top:0' });
      const steps = Math.max(1, Math.ceil(across / Math.max(2, wide / 44)));
      for (let x = 0; x < across; x += steps) picture.append(svg('text', { x: edge + (x + 0.5) * wide / across, y: height - 6, 'text-anchor': 'middle' }, String(rounds[x])));
      if (order.value === 'index') for (const y of [0, rows.length - 1]) picture.append(
        svg('text', { x: edge - 5, y: 4 + (y + 0.5) * tall / rows.length + 4, 'text-anchor': 'end' }, String(found.channel(rows[y]))));
      picture.append(svg('text', { x: 0, y: height / 2, transform: `rotate(-90 10 ${height / 2})` }, 'channel'));
      plot.append(html('div', { class: 'stack', style: `position:relative;width:${width}px;height:${height}px` }, canvas, picture));
      const bar = html('canvas', { width: 64, height: 1 }), ink = bar.getContext('2d');
      for (let x = 0; x < 64; x += 1) { ink.fillStyle = `rgb(${ramp(x / 63).join(',')})`; ink.fillRect(x, 0, 1, 1); }
      plot.append(html('div', { class: 'ramp' }, digits4(found.low), bar, digits4(found.high),
        html('span', {}, found.channels ? `${rows.length} of ${found.all} channels` : `${found.all} channels`)));
      const stops = [];
      rows.forEach((row, y) => { for (let x = 0; x < across; x += 1) stops.push([row, y, x]); });
      const made = stops.map(([row, y, x]) => ({
        x: edge + (x + 0.5) * wide / across, y: 4 + (y + 0.5) * tall / rows.length,
        title: `Channel ${found.channel(row)}, round ${rounds[x]}`, rows: [[null, statistic.value, digits4(found.value(row, x))]],
        mark: () => picture.append(svg('rect', { class: 'mark picked', x: edge + x * wide / across, y: 4 + y * tall / rows.length, width: wide / across, height: Math.max(3, tall / rows.length) })),
      }));
      made.across = across;
      return made;
    }, () => {
      const found = field();
      return table(`${statistic.value}, ${layer.value}: channels by round`, ['channel', ...(found ? found.rounds.map(String) : [])],
        found ? found.rows.map((row) => [String(found.channel(row)), ...found.rounds.map((_, at) => digits4(found.value(row, at)))]) : []);
    }));
    const quantiles = ['lowest', '10 %', 'median', '90 %', 'highest'];
    const lineup = () => {
      const found = field();
      if (!found) return [];
      const [least, tenth, median, most, top] = found.quantiles;
      return [
        { name: 'highest', place: 6, x: found.rounds, y: top, show: digits4 },
        { name: 'median (10 to 90 %)', place: 0, x: found.rounds, y: median, low: tenth, high: most, show: digits4 },
        { name: 'lowest', place: 6, x: found.rounds, y: least, show: digits4 },
      ];
    };
    agains.push(chart(right, (plot, width) => lines(plot, width, lineup(), {
      across: 'round', up: statistic.value, integer: true, mark: (value) => `Round ${value}`,
    }), () => {
      const found = field();
      return table(`${statistic.value}, ${layer.value}: quantiles over channels`, ['round', ...quantiles],
        found ? found.rounds.map((round, at) => [String(round), ...found.quantiles.map((row) => digits4(row[at]))]) : []);
    }));
    return agains;
  }

  // Tables that can be sorted

  for (const made of every('table.sortable')) {
    every('thead th', made).forEach((head, column) => {
      const button = html('button', { type: 'button', class: 'sort', title: 'Sort by this column' }, ...head.childNodes);
      head.replaceChildren(button);
      button.addEventListener('click', () => {
        const down = head.getAttribute('aria-sort') !== 'descending';
        every('thead th', made).forEach((other) => other.removeAttribute('aria-sort'));
        head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
        const key = (row) => {
          const cell = row.children[column], given = cell.dataset.order;
          return given === undefined ? (column ? -Infinity : cell.textContent) : Number(given);
        };
        const rows = every('tbody tr', made).sort((a, b) => {
          const [one, other] = [key(a), key(b)];
          return (one < other ? -1 : one > other ? 1 : 0) * (down ? -1 : 1);
        });
        find('tbody', made).append(...rows);
      });
    });
  }

  // Light and dark

  const button = find('#theme'), root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches);
  const name = () => { button.textContent = dark() ? 'Light' : 'Dark'; button.setAttribute('aria-label', `Switch to ${dark() ? 'light' : 'dark'} colours`); };
  const stored = (value) => { try { if (value) localStorage.setItem('fedfa-theme', value); return localStorage.getItem('fedfa-theme'); } catch { return null; } };
  if (['light', 'dark'].includes(stored())) root.dataset.theme = stored();
  button.hidden = false;
  button.addEventListener('click', () => { root.dataset.theme = dark() ? 'light' : 'dark'; stored(root.dataset.theme); name(); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', name);
  name();

  every('.panel').forEach((section, place) => panel(section, data.panels[place]));
  root.dataset.ready = 'yes';
})();
