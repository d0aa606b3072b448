const rank = text => {  // [0, sign, size] of a number, [1, text] of a word; sizes as powers of ten, since some exceed floats
  const power = /^10\^(-?[\d.]+)/.exec(text), v = power ? 1 : text.startsWith('inf') ? Infinity : parseFloat(text.replace(/^\[/, ''));
  if (Number.isNaN(v)) return [1, text];
  const size = power ? parseFloat(power[1]) : Math.log10(Math.abs(v));
  return [0, Math.sign(v), v === 0 ? 0 : v < 0 ? -size : size];
};
const compare = (a, b) => { for (let i = 0; i < 3; i++) { if (a[i] < b[i]) return -1; if (a[i] > b[i]) return 1; } return 0; };
for (const button of document.querySelectorAll('th button')) button.addEventListener('click', () => {
  const head = button.parentElement, body = head.closest('table').tBodies[0], k = head.cellIndex;
  const down = head.getAttribute('aria-sort') === 'ascending';
  for (const other of head.parentElement.children) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const rows = [...body.rows].sort((a, b) => compare(...[a, b].map(row => rank(row.cells[k].textContent.trim()))));
  body.append(...(down ? rows.reverse() : rows));
});
