/* Numbers for people. Bytes are written as rekindle prints them. */

function tenths(value) {
  const scaled = value * 10;
  const isTie = Math.abs(scaled % 1) === 0.5;
  const whole = isTie ? 2 * Math.round(scaled / 2) : Math.round(scaled);
  return (whole / 10).toFixed(1).replace(/\.0$/, "");
}

function formatBytes(count) {
  let value = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(Math.round(value * 10) / 10) < 1024) return `${tenths(value)} ${unit}`;
    value /= 1024;
  }
  return `${tenths(value)} TiB`;
}

function formatSeconds(seconds) {
  if (seconds >= 10) return `${seconds.toFixed(1)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toFixed(1)} ms`;
  return `${(seconds * 1e6).toFixed(0)} µs`;
}

function formatRatio(ratio) {
  return `${ratio.toFixed(2)}×`;
}

function formatShare(share) {
  return `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;
}

function formatChange(before, after, format) {
  const change = after - before;
  if (format(Math.abs(change)) === format(0)) return "the same";
  return `${change > 0 ? "+" : "−"}${format(Math.abs(change))}`;
}

/* Round numbers for an axis, from 0 to a bit above the highest value. */
function axisTicks(most, count, base) {
  if (!(most > 0)) return [0];
  const rough = most / count;
  const power = base === 2 ? 2 ** (10 * Math.floor(Math.log2(rough) / 10)) : 10 ** Math.floor(Math.log10(rough));
  const steps = base === 2 ? [1, 2, 5, 10, 20, 50, 100, 200, 512, 1024] : [1, 2, 2.5, 5, 10];
  const step = power * steps.find((each) => each * power >= rough);
  const ticks = [];
  for (let at = 0; at <= most * 1.0001; at += step) ticks.push(at);
  return ticks;
}
