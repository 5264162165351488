// What is wrong with a page for those who use a keyboard or a screen reader: a list of lines.
() => {
  const found = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const want = (right, line) => { if (!right) found.push(line); };
  for (const name of ['header', 'nav', 'main', 'footer', 'h1']) want(all(name).length === 1, `${all(name).length} ${name}`);
  let last = 0;
  for (const head of all('h1, h2, h3, h4, h5, h6')) {
    const level = Number(head.tagName[1]);
    want(level <= last + 1, `${head.textContent} skips from h${last} to h${level}`);
    last = level;
  }
  for (const field of all('input, select')) want(field.labels.length || field.ariaLabel, 'a field without a label');
  for (const button of all('button')) want(button.ariaLabel || button.textContent.trim(), 'a button without a name');
  for (const table of all('table')) {
    want(table.caption && table.caption.textContent.trim(), 'a table without a caption');
    for (const head of table.querySelectorAll('th')) want(head.scope, `th without scope: ${head.textContent}`);
  }
  for (const plot of all('.plot')) want(plot.ariaLabel && plot.tabIndex === 0, 'a chart that cannot be reached');
  for (const picture of all('svg')) want(picture.getAttribute('aria-hidden') === 'true', 'a picture that is read out');
  for (const box of all('.scroll')) want(box.ariaLabel && box.tabIndex === 0, 'a scrolling box without keys');
  const ids = all('[id]').map((node) => node.id);
  want(new Set(ids).size === ids.length, 'an id twice');
  for (const link of all('a[href^="#"]')) want(document.getElementById(link.hash.slice(1)), `nothing at ${link.hash}`);
  want(document.documentElement.lang && document.title, 'no language or no title');
  return found;
}
